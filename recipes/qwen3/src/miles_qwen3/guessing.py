"""A small text game of several turns, played against the session server: find a hidden digit.

The player is told between which digits it lies, names one, and is told `higher` or `lower` by one character, `+` or
`-`, until it has found the digit or used up its guesses. This is an agent as any other: it knows a base URL and the
OpenAI chat API, and nothing of tokens. `python -m miles_qwen3.guessing FOLDER` writes the problems: every digit of 28
ranges for training, every digit of 8 other ranges held out.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Task
from miles_qwen3.chat import Chat

GUESSES = 4
"""Halving ten digits needs at most four."""
SMALLEST_RANGE = 3
HELD_OUT_RANGES, SPLIT_SEED = 8, 3
TRAIN_FILE, HELD_OUT_FILE = "guess_train.jsonl", "guess_held_out.jsonl"


async def play(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """One game, opened by the task's message. `task.label` is the hidden digit.

    The guess of a turn is the first digit in its text. A turn without one ends the game; so does a turn that met its
    length limit, since it cannot be continued. The reward is 1 for a digit found at once and 0.1 less for every further
    guess; else at most 0.4, less with every step between the last guess and the digit. If the only guess stands in a
    turn that ran on, it is worth a quarter of that, so that ending a turn pays; 0 without any guess.
    """
    hidden = _hidden_digit(task)
    told = {"role": "user", "content": str(task.messages[-1].content)}
    last: int | None = None
    async with Chat(base_url, params, metadata) as chat:
        for guesses in range(GUESSES):
            reply = await chat.ask(told)
            found = re.search("[0-9]", reply.content)
            if found is None or not reply.complete:
                stray = int(found.group()) if found is not None else None
                return _result(hidden, last, guesses, stray=stray, legal=False)
            last = int(found.group())
            if last == hidden:
                return _result(hidden, last, guesses + 1)
            told = {"role": "user", "content": "+" if last < hidden else "-"}
    return _result(hidden, last, GUESSES)


def reward_of(hidden: int, last: int | None, guesses: int, stray: int | None = None) -> float:
    """Reward of a game.

    Args:
        hidden: the digit.
        last: the last guess of a turn that ended by itself, None without any.
        guesses: how many such guesses there were.
        stray: the guess in a turn that ran on.
    """
    if last == hidden:
        return 1.0 - 0.1 * (guesses - 1)
    if last is not None:
        return 0.4 * (1.0 - abs(last - hidden) / 9)
    return 0.0 if stray is None else 0.1 * (1.0 - abs(stray - hidden) / 9)


def _hidden_digit(task: Task) -> int:
    if not isinstance(task.label, int) or not 0 <= task.label <= 9:
        raise InvalidFieldError("label", task.label, "this game hides a whole number from 0 to 9")
    return task.label


def _result(
    hidden: int, last: int | None, guesses: int, *, stray: int | None = None, legal: bool = True
) -> AgentResult:
    metrics = {"found": float(last == hidden), "guesses": float(guesses), "illegal": float(not legal)}
    return AgentResult(reward=reward_of(hidden, last, guesses, stray), metrics=metrics)


def ranges() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(training, held-out) pairs of first and last digit, disjoint, together every range that is not too small."""
    everything = [(low, high) for low in range(10) for high in range(low + SMALLEST_RANGE - 1, 10)]
    random.Random(SPLIT_SEED).shuffle(everything)
    return everything[HELD_OUT_RANGES:], everything[:HELD_OUT_RANGES]


def problems(chosen: Iterable[tuple[int, int]]) -> list[tuple[str, int]]:
    """(opening, hidden digit) for every digit of every range."""
    return [(f"{low}-{high}?", digit) for low, high in chosen for digit in range(low, high + 1)]


def lines(chosen: Iterable[tuple[int, int]]) -> str:
    """The games of some ranges as JSONL."""
    return "".join(json.dumps({"prompt": opening, "label": digit}) + "\n" for opening, digit in problems(chosen))


def write_files(folder: Path) -> None:
    """Write training and held-out games."""
    train, held_out = ranges()
    (folder / TRAIN_FILE).write_text(lines(train))
    (folder / HELD_OUT_FILE).write_text(lines(held_out))


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
