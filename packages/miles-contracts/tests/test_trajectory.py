from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import groups, trajectories

from miles_contracts import (
    Group,
    InvalidFieldError,
    RoutingTrace,
    SamplingTransform,
    Status,
    Trajectory,
    TrajectoryIdentity,
    Turn,
    VersionSpan,
)

NAN = float("nan")


def make(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "identity": TrajectoryIdentity(prompt_index=3, member=1),
        "token_ids": np.array([5, 6, 7, 8, 9], dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 0, 1], dtype=np.bool_),
        "logprobs": np.array([NAN, NAN, -0.5, -1.5, -2.5], dtype=np.float32),
        "version_spans": (VersionSpan(start=2, end=4, version=7), VersionSpan(start=4, end=5, version=8)),
        "status": Status.FINISHED,
    }
    return Trajectory(**{**fields, **changes})


def test_counts_and_versions() -> None:
    t = make()
    assert (t.num_tokens, t.num_sampled, t.num_trained) == (5, 3, 2)
    assert (t.oldest_version, t.newest_version) == (7, 8)


def test_unknown_version_is_its_own_state() -> None:
    spans = (VersionSpan(start=2, end=4, version=None), VersionSpan(start=4, end=5, version=8))
    t = make(version_spans=spans)
    assert t.has_unknown_version
    assert t.oldest_version is None
    assert t.newest_version is None


def test_arrays_are_read_only_and_the_callers_array_stays_its_own() -> None:
    ids = np.arange(5, dtype=np.int32)
    t = make(token_ids=ids)
    with pytest.raises(ValueError, match="read-only"):
        t.token_ids[0] = 1
    ids[0] = 4  # the caller may still write to its own handle


def test_structures_are_frozen() -> None:
    with pytest.raises(AttributeError):
        make().reward = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 2, 3, 4, 5]}, "token_ids.*numpy array of dtype int32"),
        ({"token_ids": np.arange(5)}, "token_ids.*int64.*int32"),
        ({"token_ids": np.zeros((5, 1), np.int32)}, "1 dimension"),
        ({"token_ids": np.array([0, -1, 0, 0, 0], np.int32)}, "-1; token ids are >= 0"),
        ({"loss_mask": np.zeros(4, np.bool_)}, "loss_mask.*must be 5"),
        ({"loss_mask": np.array([1, 0, 1, 0, 1], np.bool_)}, "only sampled tokens"),
        ({"logprobs": np.array([NAN, NAN, NAN, -1, -1], np.float32)}, "logprobs: got 2"),
        ({"logprobs": np.array([NAN, -1, -1, -1, -1], np.float32)}, "logprobs: got 1"),
        ({"logprobs": np.array([NAN, NAN, 0.1, -1, -1], np.float32)}, "finite and <= 0"),
        ({"logprobs": np.array([NAN, NAN, -np.inf, -1, -1], np.float32)}, "finite and <= 0"),
        ({"version_spans": (VersionSpan(start=2, end=6, version=0),)}, "inside"),
        (
            {"version_spans": (VersionSpan(start=3, end=5, version=0), VersionSpan(start=2, end=3, version=0))},
            "sorted and disjoint",
        ),
        ({"turns": (Turn(start=2, end=6, finish_reason="stop"),)}, "turns"),
        ({"reward": NAN}, "reward.*finite"),
        ({"reward": float("inf")}, "reward.*finite"),
        ({"metrics": {"x": NAN}}, r"metrics\['x'\]"),
        ({"routing": RoutingTrace.of(np.zeros((2, 1, 1), np.int64), 4)}, "T-1 rows"),
    ],
)
def test_broken_invariants_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        make(**changes)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 2)])
def test_bad_spans(start: int, end: int) -> None:
    with pytest.raises(InvalidFieldError, match="start < end"):
        VersionSpan(start=start, end=end, version=0)


@pytest.mark.parametrize("version", [-1])
def test_negative_version(version: int) -> None:
    with pytest.raises(InvalidFieldError, match="None when unknown"):
        VersionSpan(start=0, end=1, version=version)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": NAN}, {"top_p": 0.0}, {"top_k": 0}, {"min_p": 2.0}]
)
def test_bad_sampling(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError, match=next(iter(bad))):
        SamplingTransform(**bad)


def test_empty_trajectory_is_allowed() -> None:
    t = make(
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        logprobs=np.zeros(0, np.float32),
        version_spans=(),
        status=Status.FAILED,
    )
    assert t.num_tokens == 0
    assert t.oldest_version is None


def test_group_order_and_membership() -> None:
    a = make(identity=TrajectoryIdentity(prompt_index=3, member=0))
    b = make(identity=TrajectoryIdentity(prompt_index=3, member=1))
    other = make(identity=TrajectoryIdentity(prompt_index=4, member=1))
    Group(prompt_index=3, size=2, trajectories=(a, b))
    for bad, message in [((b, a), "ordered"), ((a, a), "unique"), ((a, other), "all of prompt 3")]:
        with pytest.raises(InvalidFieldError, match=message):
            Group(prompt_index=3, size=2, trajectories=bad)
    with pytest.raises(InvalidFieldError, match="member < size 1"):
        Group(prompt_index=3, size=1, trajectories=(a, b))


def test_group_fails_with_a_missing_failed_or_aborted_member() -> None:
    a = make(identity=TrajectoryIdentity(prompt_index=3, member=0))
    b = make(identity=TrajectoryIdentity(prompt_index=3, member=1))
    assert not Group(prompt_index=3, size=2, trajectories=(a, b)).failed
    assert Group(prompt_index=3, size=2, trajectories=(a,)).failed
    for status in (Status.FAILED, Status.ABORTED):
        assert Group(prompt_index=3, size=2, trajectories=(a, b.replace(status=status))).failed
    assert not Group(prompt_index=3, size=2, trajectories=(a, b.replace(status=Status.TRUNCATED))).failed


def test_group_version_is_unknown_when_any_members_is() -> None:
    a = make(identity=TrajectoryIdentity(prompt_index=3, member=0))
    unknown = (VersionSpan(start=2, end=5, version=None),)
    b = make(identity=TrajectoryIdentity(prompt_index=3, member=1), version_spans=unknown)
    assert Group(prompt_index=3, size=2, trajectories=(a,)).oldest_version == 7
    assert Group(prompt_index=3, size=2, trajectories=(a, b)).oldest_version is None


@given(trajectories())
def test_every_token_is_either_sampled_with_a_version_span_or_unknown(t: Trajectory) -> None:
    covered = np.zeros(t.num_tokens, np.bool_)
    for span in t.version_spans:
        assert not covered[span.start : span.end].any()
        covered[span.start : span.end] = True
    assert np.array_equal(covered, np.isfinite(t.logprobs))
    assert t.num_trained <= t.num_sampled == int(covered.sum())


@given(groups())
def test_group_totals(group: Group) -> None:
    assert group.num_tokens == sum(t.num_tokens for t in group)
    routes = sum(t.routing.num_bytes for t in group if t.routing)
    assert group.num_bytes == routes + 9 * group.num_tokens  # 4 + 1 + 4 bytes a token
