"""A fault is told once and counted; what a prompt came to is counted once, however often it was tried."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rollout_factories import group

from miles_rollout.buffer import Dropped, Verdict
from miles_rollout.fates import OTHER, Fates, Faults
from miles_rollout.ledger import Fate


def dropped(index: int, reason: str, attempt: int = 0) -> Dropped:
    return Dropped(group=group(index, attempt=attempt), verdict=Verdict.FAILED, reason=reason)


def test_one_place_is_one_fault_whatever_values_it_names() -> None:
    faults = Faults()
    for i in range(5):
        first, count = faults.note(f"reward raised KeyError: 'answer {'abc'[i % 3]}' (/my/r.py:12)")
    assert (first, count) == ("reward raised KeyError: 'answer a' (/my/r.py:12)", 5)
    assert faults.note("reward raised KeyError: 'x' (/my/r.py:30)")[1] == 1, "another place"
    assert faults.note("reward raised ValueError: 'x' (/my/r.py:12)")[1] == 1, "another error"
    assert faults.note("the episode took longer than 5 s")[1] == 1
    assert faults.note("the episode took longer than 7 s")[1] == 2


@given(st.lists(st.text(max_size=12), max_size=120))
def test_nothing_is_lost_and_kinds_are_bounded(reasons: list[str]) -> None:
    faults = Faults()
    for reason in reasons:
        faults.note(reason)
    assert sum(faults.counts.values()) == len(reasons)
    assert len(faults.counts) <= 33


def test_a_long_reason_keeps_its_place() -> None:
    faults, words = Faults(), "no " * 200
    for line in (3, 4, 4):
        faults.note(f"reward raised ValueError: {words}(/my/r.py:{line})")
    shown = f"reward raised ValueError: {words}"
    ends = {text[284:]: count for text, count in faults.counts.items()}
    assert ends == {"... (/my/r.py:3)": 1, "... (/my/r.py:4)": 2}
    assert all(len(text) == 300 and shown.startswith(text[:284]) for text in faults.counts)
    for end in "xy":  # two kinds that look alike
        faults.note("z" * 299 + end * 9)
    assert sum(faults.counts.values()) == 5
    assert faults.counts["z" * 297 + "..."] == 2


def test_what_is_beyond_the_bound_is_counted_together() -> None:
    faults = Faults()
    letters = [chr(ord("a") + i) * 3 for i in range(26)] + [chr(ord("A") + i) * 3 for i in range(10)]
    for text in letters:
        faults.note(text)
    assert faults.counts[OTHER] == 4
    assert faults.note("ZZZ") == (OTHER, 5)


def test_a_fault_is_told_once_and_as_it_grows_tenfold() -> None:
    told: list[str] = []
    fates = Fates(told.append)
    for i in range(250):
        fates.failed(dropped(i, "reward raised ValueError: boom (/my/r.py:3)"))
    assert told == [
        "a group failed: reward raised ValueError: boom (/my/r.py:3) (groups that fail so are counted from now on, not "
        "named)",
        "10 groups have failed by now: reward raised ValueError: boom (/my/r.py:3)",
        "100 groups have failed by now: reward raised ValueError: boom (/my/r.py:3)",
    ]
    assert fates.failures == {"reward raised ValueError: boom (/my/r.py:3)": 250}
    told.clear()
    for i in range(12):
        fates.settle(Fate.GIVEN_UP, dropped(i, "no", attempt=2))
        fates.settle(Fate.RETRIED, dropped(i, "no"))
    assert told == ["prompt 0 is given up after attempt 2: no", "10 prompts are given up by now: no"]
    metrics = fates.take_metrics()
    assert metrics["rollout/fully_async/given_up_prompts"] == metrics["rollout/fully_async/retries"] == 12
    assert set(fates.take_metrics().values()) == {0.0}
