"""Planning and laying out micro-batches: every trained token once, with its share of the whole step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError, Trajectory
from miles_trainer.batching import (
    build_micro_batch,
    check_trajectories,
    first_fit_decreasing,
    padded_bins,
    token_weights,
)
from miles_trainer.config import Aggregation

Make = Callable[..., Trajectory]
SIZES = st.lists(st.integers(1, 40), max_size=60)


@given(SIZES, st.integers(1, 50))
def test_first_fit_decreasing(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        assert sum(sizes[i] for i in b) <= capacity or len(b) == 1
    # no two bins of the plan could be one
    loads = sorted(sum(sizes[i] for i in b) for b in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity
    lower = -(-sum(min(s, capacity) for s in sizes) // capacity)
    assert len(bins) <= 11 * max(lower, sum(s > capacity for s in sizes)) / 9 + 1 + sum(2 * s > capacity for s in sizes)


def test_first_fit_decreasing_is_deterministic_and_tight() -> None:
    assert first_fit_decreasing([3, 7, 5, 5, 7, 3], 10) == [[1, 0], [4, 5], [2, 3]]
    assert first_fit_decreasing([], 10) == []
    assert first_fit_decreasing([99], 10) == [[0]]


@given(SIZES, st.integers(1, 50))
def test_padded_bins(sizes: list[int], capacity: int) -> None:
    bins = padded_bins(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        assert max(sizes[i] for i in b) * len(b) <= capacity or len(b) == 1


def test_token_weights() -> None:
    counts, members = np.array([3, 1, 4]), np.array([0, 0, 1])
    np.testing.assert_allclose(token_weights(counts, members, 2, Aggregation.TOKEN, None), [1 / 8] * 3)
    # members 0 (two branches, 4 tokens) and 1 (4 tokens) weigh the same
    np.testing.assert_allclose(token_weights(counts, members, 2, Aggregation.TRAJECTORY, None), [1 / 8] * 3)
    counts = np.array([3, 2, 10])
    np.testing.assert_allclose(
        token_weights(counts, members, 2, Aggregation.TRAJECTORY, None), [1 / 10, 1 / 10, 1 / 20]
    )
    np.testing.assert_allclose(token_weights(counts, members, 2, Aggregation.CONSTANT, 50.0), [1 / 100] * 3)
    with pytest.raises(InvalidFieldError, match="aggregation_constant"):
        token_weights(counts, members, 2, Aggregation.CONSTANT, None)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(0, 2))
def test_means_weigh_one_in_total(counts: list[int], branch: int) -> None:
    members = np.maximum(np.arange(len(counts)) - branch, 0)
    for aggregation in (Aggregation.TOKEN, Aggregation.TRAJECTORY):
        weights = token_weights(np.array(counts), members, int(members.max()) + 1, aggregation, None)
        assert (weights * counts).sum() == pytest.approx(1.0)


def test_micro_batch_feeds_up_to_the_last_trained_token(make_trajectory: Make) -> None:
    a = make_trajectory(member=0, total=9, start=4, temperature=0.5)
    mask = a.loss_mask.copy()
    mask[7:] = False  # an untrained tail
    a = a.replace(loss_mask=mask)
    b = make_trajectory(member=1, total=6, start=3, temperature=0.0)
    micro = build_micro_batch([a, b], np.array([2.0, -1.0]), np.array([0.1, 0.2]))
    assert micro.chunks.length.tolist() == [6, 5]
    assert micro.token_ids.tolist() == [*a.token_ids[:6], *b.token_ids[:5]]
    assert micro.position_ids.tolist() == [*range(6), *range(5)]
    assert micro.sources.tolist() == [3, 4, 5, 6 + 2, 6 + 3, 6 + 4]
    assert micro.targets.tolist() == [*a.token_ids[4:7], *b.token_ids[3:6]]
    assert micro.target_index.tolist() == [4, 5, 6, 3, 4, 5]
    assert micro.segments.tolist() == [0, 0, 0, 1, 1, 1]
    # temperature 0 is greedy, whose log-probs are those of temperature 1
    np.testing.assert_allclose(micro.inverse_temperature, [2, 2, 2, 1, 1, 1])
    np.testing.assert_allclose(micro.engine_logprobs, [*a.logprobs[4:7], *b.logprobs[3:6]])
    np.testing.assert_allclose(micro.advantages, [2, 2, 2, -1, -1, -1])
    np.testing.assert_allclose(micro.weights, [0.1] * 3 + [0.2] * 3)


def test_scoring_predicts_every_token_but_the_first(make_trajectory: Make) -> None:
    a, b = make_trajectory(total=4, start=2), make_trajectory(total=1, start=1)
    micro = build_micro_batch([b, a])
    assert micro.chunks.length.tolist() == [0, 3]
    assert micro.targets.tolist() == a.token_ids[1:].tolist()
    assert micro.sources.tolist() == [0, 1, 2]


def test_refusals(make_trajectory: Make) -> None:
    t = make_trajectory(prompt=7, member=2)
    check_trajectories([t], 61, 12)
    with pytest.raises(InvalidFieldError, match=r"prompt 7 member 2.*vocabulary has 10"):
        check_trajectories([t], 10, None)
    with pytest.raises(InvalidFieldError, match="holds at most 11"):
        check_trajectories([t], 61, 11)
    with pytest.raises(InvalidFieldError, match="first token has no context"):
        check_trajectories([make_trajectory(start=0)], 61, None)
