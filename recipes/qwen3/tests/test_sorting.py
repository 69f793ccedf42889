"""The default task is honest: disjoint splits, right labels, a reward whose maximum is the answer and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import Message, Task
from miles_qwen3 import sorting

TEXT = st.text(alphabet="abcx", max_size=9)


def task(label: str) -> Task:
    return Task(prompt_index=0, messages=(Message(role="user", content="sort"),), label=label)


def test_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    sorting.write_files(tmp_path)
    for name in (sorting.TRAIN_FILE, sorting.HELD_OUT_FILE):
        assert (tmp_path / name).read_text() == sorting.data_file(name).read_text()


def test_splits_are_disjoint_and_complete() -> None:
    train, held_out = sorting.rows()
    assert len(held_out) == sorting.HELD_OUT
    assert not set(train) & set(held_out)
    assert len(set(train) | set(held_out)) == len(sorting.DIGITS) ** sorting.LENGTH


def test_labels_are_the_sorted_digits() -> None:
    for name in (sorting.TRAIN_FILE, sorting.HELD_OUT_FILE):
        for line in sorting.data_file(name).read_text().splitlines():
            item = json.loads(line)
            row = item["prompt"].removeprefix("sort ")
            assert item["label"] == "".join(sorted(row))


@given(TEXT, TEXT.filter(bool))
async def test_reward_is_one_for_the_answer_and_less_for_all_else(response: str, label: str) -> None:
    value = await sorting.closeness(task(label), response)
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (response == label)


@pytest.mark.parametrize(
    ("response", "value"), [("", 0.0), ("aabc", 1.0), ("aab", 0.75), ("xxxx", 0.0), ("aabcc", 0.4), ("aabb", 0.75)]
)
async def test_reward_by_hand(response: str, value: float) -> None:
    assert await sorting.closeness(task("aabc"), response) == pytest.approx(value)


@given(TEXT, TEXT, TEXT)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert (sorting.edit_distance(a, b) == 0) == (a == b)
    assert sorting.edit_distance(a, b) == sorting.edit_distance(b, a)
    assert sorting.edit_distance(a, c) <= sorting.edit_distance(a, b) + sorting.edit_distance(b, c)


@pytest.mark.parametrize(("a", "b", "distance"), [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3)])
def test_edit_distance_by_hand(a: str, b: str, distance: int) -> None:
    assert sorting.edit_distance(a, b) == distance
