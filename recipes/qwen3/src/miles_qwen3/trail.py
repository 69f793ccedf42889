"""The trail game: its problems and the tools it is played with. `trail_agent` plays it.

The player is told where to start. The note at a place, read by calling the tool `look`, names the next place, and the
last note is a letter: the box of that letter has to be opened with the tool `open`. Every call needs what the last one
has answered, so the game is won only by a policy that reads the results of its calls; they are OpenAI tool calls in
Qwen3's own form. `python -m miles_qwen3.trail FOLDER` writes the problems: 48 trails for training, 16 held out.

Half of the training games start at a letter and take one call. Without them a policy that starts at random has
unlearnt the second tool by the time it gets as far as the end of a trail.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLACES, LETTERS = "0123", "abcd"
HELD_OUT, SPLIT_SEED = 16, 11
TRAIN_FILE, HELD_OUT_FILE = "trail_train.jsonl", "trail_held_out.jsonl"


def _tool(name: str, does: str, argument: str, kind: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": kind}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


TOOLS = (
    _tool("look", "Read the note at a place.", "at", "integer"),
    _tool("open", "Open the box of a letter.", "box", "string"),
)
CALLS = {place: f'{{"name": "look", "arguments": {{"at": {place}}}}}' for place in PLACES} | {
    letter: f'{{"name": "open", "arguments": {{"box": "{letter}"}}}}' for letter in LETTERS
}
"""What a model writes between the tags of a call, by the note that asks for it."""


def opening(trail: str) -> str:
    """The first message of a game."""
    return f"start {trail[0]}"


def trails() -> tuple[list[str], list[str]]:
    """(training trails, held-out trails), disjoint, together every trail of one or two places."""
    short = ["".join(t) for t in itertools.product(PLACES, LETTERS)]
    long = ["".join((*p, c)) for p in itertools.permutations(PLACES, 2) for c in LETTERS]
    everything = short + long
    random.Random(SPLIT_SEED).shuffle(everything)
    return everything[HELD_OUT:], everything[:HELD_OUT]


def training_games() -> list[str]:
    """The training trails, the short ones repeated, and as many games of the letter alone: both tools are met first."""
    train, _ = trails()
    return [*(20 * LETTERS), *(trail for trail in train for _ in range(3 if len(trail) == 2 else 1))]


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
