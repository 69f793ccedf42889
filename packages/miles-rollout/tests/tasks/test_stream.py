"""A task stream is a pure function of its ordinal and resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_rollout.tasks import JsonlTasks
from miles_rollout.tasks.stream import epoch_order


def write(path: Path, count: int, start: int = 0) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "label": i}) + "\n" for i in range(start, start + count)))
    return path


@given(size=st.integers(1, 300), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed, epoch).tolist()) == list(range(size))


def test_order_is_frozen_for_ever() -> None:
    # Golden: computed once from the definition (splitmix64 keys) with plain Python integers, below.
    mask = 2**64 - 1

    def mix(v: int) -> int:
        v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9 & mask
        v = (v ^ (v >> 27)) * 0x94D049BB133111EB & mask
        return v ^ (v >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, epoch in ((0, 0), (7, 0), (7, 3), (2**63 + 5, 12)):
        start = mix(mix(seed) + epoch * golden & mask)
        keys = [mix(start + i * golden & mask) for i in range(1, 101)]
        assert epoch_order(100, seed, epoch).tolist() == sorted(range(100), key=lambda i: keys[i])


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@settings(max_examples=30)
@given(size=st.integers(1, 7), taken=st.integers(0, 30), shuffle=st.booleans())
def test_resume_gives_what_would_have_come(tmp_path_factory, size: int, taken: int, shuffle: bool) -> None:
    path = write(tmp_path_factory.mktemp("tasks") / "a.jsonl", size)
    whole = JsonlTasks(path, seed=3, shuffle=shuffle)
    expected = [whole.next() for _ in range(taken + 20)]
    first = JsonlTasks(path, seed=3, shuffle=shuffle)
    for _ in range(taken):
        first.next()
    second = JsonlTasks(path, seed=3, shuffle=shuffle)
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.next() for _ in range(20)] == expected[taken:]
    assert [whole.at(i) for i in range(taken + 20)] == expected
    assert [t.prompt_index for t in expected] == list(range(taken + 20))


def test_each_epoch_visits_every_item_once(tmp_path: Path) -> None:
    tasks = JsonlTasks(write(tmp_path / "a.jsonl", 11), seed=5)
    epochs = [[tasks.next().label for _ in range(11)] for _ in range(3)]
    assert all(sorted(e) == list(range(11)) for e in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 4}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"limit": 4}, "fingerprint"),
    ],
)
def test_restore_refuses_another_stream(tmp_path: Path, change: dict, field: str) -> None:
    path = write(tmp_path / "a.jsonl", 5)
    state = JsonlTasks(path, seed=3).state()
    with pytest.raises(InvalidFieldError, match=field):
        JsonlTasks(path, **({"seed": 3} | change)).restore(state)


def test_restore_refuses_changed_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 5)
    state = JsonlTasks(path).state()
    write(path, 5, start=1)
    with pytest.raises(InvalidFieldError, match="fingerprint"):
        JsonlTasks(path).restore(state)


@pytest.mark.parametrize("position", [-1, None, "3"])
def test_restore_refuses_a_bad_position(tmp_path: Path, position: object) -> None:
    tasks = JsonlTasks(write(tmp_path / "a.jsonl", 5))
    with pytest.raises(InvalidFieldError, match="next"):
        tasks.restore(tasks.state() | {"next": position})


def test_negative_ordinals_and_seeds_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 5)
    with pytest.raises(InvalidFieldError, match="ordinals start at 0"):
        JsonlTasks(path).at(-1)
    with pytest.raises(InvalidFieldError, match="seed"):
        JsonlTasks(path, seed=-1)
