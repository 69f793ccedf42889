"""How a step is divided among ranks: everything once, balanced, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import Trajectory
from miles_trainer.shares import divide


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(6, 60)), min_size=1, max_size=40),
    ranks=st.integers(1, 6),
)
def test_every_trajectory_has_one_rank_and_ranks_are_balanced(
    make_trajectory: Callable[..., Trajectory], sizes: list[tuple[int, int]], ranks: int
) -> None:
    trajectories = [make_trajectory(prompt=p, member=m, total=size) for m, (p, size) in enumerate(sizes)]
    shares = divide(trajectories, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    assert shares == divide(trajectories, ranks)
    loads = [sum(sizes[i][1] for i in share) for share in shares]
    total = sum(size for _, size in sizes)
    # Graham's bound for the longest first, and what keeping prompts together may cost
    unavoidable = max(total / ranks, max(size for _, size in sizes))
    assert max(loads) <= 1.05 * (4 / 3) * unavoidable + 60 / ranks


def test_a_prompt_stays_on_one_rank_while_that_costs_no_balance(make_trajectory: Callable[..., Trajectory]) -> None:
    even = [make_trajectory(prompt=p, member=m, total=20) for p in range(4) for m in range(4)]
    for share in divide(even, 2):
        assert len({even[i].identity.prompt_index for i in share}) == 2
    lone = [make_trajectory(prompt=0, member=m, total=20) for m in range(4)]
    assert [len(share) for share in divide(lone, 2)] == [2, 2]


def test_more_ranks_than_trajectories_leave_some_without_work(make_trajectory: Callable[..., Trajectory]) -> None:
    pair = [make_trajectory(member=m) for m in range(2)]
    assert sorted(len(share) for share in divide(pair, 4)) == [0, 0, 1, 1]
