"""The default task: sort the digits of a short row. Prompts, answers and the reward.

All 243 rows of five digits from 0 to 2 are split once, at random but fixed, into 179 for training and 64 held out,
and kept in `data/` as JSONL. `python -m miles_qwen3.sorting FOLDER` writes the two files again.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from miles_contracts import Task

DIGITS, LENGTH, HELD_OUT, SPLIT_SEED = "012", 5, 64, 7
TRAIN_FILE, HELD_OUT_FILE = "sort_train.jsonl", "sort_held_out.jsonl"


def rows() -> tuple[list[str], list[str]]:
    """(training rows, held-out rows), disjoint, together every row there is."""
    everything = ["".join(digits) for digits in itertools.product(DIGITS, repeat=LENGTH)]
    random.Random(SPLIT_SEED).shuffle(everything)
    return everything[HELD_OUT:], everything[:HELD_OUT]


def lines(chosen: Iterable[str]) -> str:
    """JSONL, one task a line."""
    return "".join(json.dumps({"prompt": f"sort {row}", "label": "".join(sorted(row))}) + "\n" for row in chosen)


def data_file(name: str) -> Path:
    """Path of a file that comes with the package."""
    return Path(str(resources.files("miles_qwen3").joinpath("data", name)))


def write_files(folder: Path) -> None:
    """Write training and held-out prompts."""
    train, held_out = rows()
    (folder / TRAIN_FILE).write_text(lines(train))
    (folder / HELD_OUT_FILE).write_text(lines(held_out))


async def closeness(task: Task, response: str) -> float:
    """Partial credit in [0, 1]: 1 - edit distance / longer length, halved for an answer that is too long.

    A model that starts at random never hits a whole answer, so training needs credit for parts. Without the halving,
    padding an almost right answer up to the length limit would be worth more than an early wrong end, and the policy
    would stop exploring where to end. Held-out answers are scored by exact match.
    """
    label = str(task.label)
    credit = 1.0 - edit_distance(response, label) / max(len(response), len(label), 1)
    return credit / 2 if len(response) > len(label) else credit


def edit_distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Least number of insertions, deletions and replacements of items that turn `a` into `b` (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
