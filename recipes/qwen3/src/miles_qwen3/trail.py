"""The trail game: its problems and the tool it is played with. `trail_agent` plays it.

The player is told where to start. The note at a place, read by calling the tool `look`, names the next place, until the
trail ends. Every call needs what the last one has answered, so the game is won only by a policy that reads the results
of its calls; they are OpenAI tool calls in Qwen3's own form. `python -m miles_qwen3.trail FOLDER` writes the problems:
16 trails for training and 20 others held out.

As many of the training games are one call long: a policy that starts at random meets the whole of a game in them before
it gets as far as a second note.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLACES, LENGTHS = "0123", (2, 3)
HELD_OUT, SPLIT_SEED = 20, 11
TRAIN_FILE, HELD_OUT_FILE = "trail_train.jsonl", "trail_held_out.jsonl"

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Read the note at a place.",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
        },
    },
)
BEFORE, AFTER = '<tool_call>\n{"name": "look", "arguments": {"at": ', "}}\n</tool_call>"
"""What a model writes before and after the place in a call."""


def opening(trail: str) -> str:
    """The first message of a game: the note that names where to start."""
    return trail[0]


def trails() -> tuple[list[str], list[str]]:
    """(training trails, held-out trails), disjoint, together every trail of two or three different places."""
    everything = ["".join(places) for length in LENGTHS for places in itertools.permutations(PLACES, length)]
    random.Random(SPLIT_SEED).shuffle(everything)
    return everything[HELD_OUT:], everything[:HELD_OUT]


def training_games() -> list[str]:
    """The training trails, and as many games of one call."""
    train, _ = trails()
    return [*train, *(PLACES * (len(train) // len(PLACES)))]


def lines(games: Iterable[str], *, all_or_nothing: bool = False) -> str:
    """JSONL, one game a line."""
    more = {"metadata": {"all_or_nothing": True}} if all_or_nothing else {}
    return "".join(json.dumps({"prompt": opening(trail), "label": trail, **more}) + "\n" for trail in games)


def write_files(folder: Path) -> None:
    """Write training and held-out games."""
    _, held_out = trails()
    (folder / TRAIN_FILE).write_text(lines(training_games()))
    (folder / HELD_OUT_FILE).write_text(lines(held_out, all_or_nothing=True))


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
