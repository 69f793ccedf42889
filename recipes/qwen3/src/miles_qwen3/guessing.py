"""A small text game of several turns, played against the session server: find a hidden digit.

The player names a digit and is told `higher` or `lower` by one character, `+` or `-`, until it has found the digit or
used up its guesses. This is an agent as any other: it knows a base URL and the OpenAI chat API, and nothing of tokens.
`python -m miles_qwen3.guessing FILE` writes the ten tasks, one for each digit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Task

GUESSES = 4
"""Halving ten digits needs at most four."""
OPENING = "0-9?"


async def play(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """One game. `task.label` is the hidden digit.

    The guess of a turn is the first digit in its text. A turn without one ends the game; so does a turn that met its
    length limit, since it cannot be continued. The reward is 1 for a digit found at once and 0.1 less for every further
    guess; else at most 0.4, less with every step between the last guess and the digit. If the only guess stands in a
    turn that ran on, it is worth a quarter of that, so that ending a turn pays; 0 without any guess.
    """
    hidden = _hidden_digit(task)
    messages: list[dict[str, str]] = [{"role": "user", "content": OPENING}]
    headers = {"Authorization": f"Bearer {metadata['api_key']}"}
    last: int | None = None
    async with aiohttp.ClientSession(headers=headers) as client:
        for guesses in range(GUESSES):
            text, complete = await _ask(client, base_url, messages, params)
            found = re.search("[0-9]", text)
            if found is None or not complete:
                stray = int(found.group()) if found is not None else None
                return _result(hidden, last, guesses, stray=stray, legal=False)
            last = int(found.group())
            if last == hidden:
                return _result(hidden, last, guesses + 1)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": "+" if last < hidden else "-"})
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


async def _ask(
    client: aiohttp.ClientSession, base_url: str, messages: list[dict[str, str]], params: SamplingParams
) -> tuple[str, bool]:
    """The answer's text, and whether the policy ended it by itself."""
    body = {"model": "policy", "messages": messages, "max_tokens": params.max_new_tokens}
    async with client.post(f"{base_url.rstrip('/')}/chat/completions", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    choice = answer["choices"][0]
    return str(choice["message"]["content"] or ""), choice["finish_reason"] != "length"


def lines() -> str:
    """The ten tasks as JSONL."""
    return "".join(json.dumps({"prompt": OPENING, "label": digit}) + "\n" for digit in range(10))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(lines())
