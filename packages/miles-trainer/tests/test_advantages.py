"""Advantages against formulas written out here, and the rules for who counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import Group, InvalidFieldError, Status, Trajectory
from miles_trainer.advantages import assign_credit, group_advantages, whiten
from miles_trainer.config import AdvantageConfig, Estimator

Make = Callable[..., Trajectory]
REWARDS = [0.0, 1.0, 0.25, 1.0]


def config(estimator: str, **more: Any) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"estimator": estimator, **more})


def group(make: Make, rewards: list[float | None], prompt: int = 0, **more: Any) -> Group:
    members = [make(prompt=prompt, member=i, reward=r, **more) for i, r in enumerate(rewards)]
    return Group(prompt_index=prompt, size=len(rewards), trajectories=tuple(members))


def test_grpo_unbiased_and_biased_std() -> None:
    mean = statistics.fmean(REWARDS)
    got = group_advantages(np.array(REWARDS), config("grpo"))
    want = [(r - mean) / (statistics.stdev(REWARDS) + 1e-6) for r in REWARDS]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    got = group_advantages(np.array(REWARDS), config("grpo", std="biased", epsilon=1e-4))
    want = [(r - mean) / (statistics.pstdev(REWARDS) + 1e-4) for r in REWARDS]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("cfg", [config("grpo", std_normalization=False), config("dr_grpo")])
def test_without_std(cfg: AdvantageConfig) -> None:
    np.testing.assert_allclose(group_advantages(np.array(REWARDS), cfg), [-0.5625, 0.4375, -0.3125, 0.4375])


def test_rloo_leaves_itself_out() -> None:
    got = group_advantages(np.array(REWARDS), config("rloo"))
    want = [r - statistics.fmean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_baselines_sum_to_zero_and_keep_order(rewards: list[float], estimator: str) -> None:
    got = group_advantages(np.array(rewards), config(estimator))
    assert abs(got.sum()) < 1e-6 * max(1.0, np.abs(got).max())
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(got[order]) >= -1e-9).all()


def test_equal_rewards_give_zero_not_nan() -> None:
    np.testing.assert_array_equal(group_advantages(np.full(4, 0.3), config("grpo")), np.zeros(4))


def test_whitening_counts_tokens() -> None:
    values, counts = np.array([1.0, -2.0, 0.5]), np.array([3, 1, 2])
    tokens = [1.0, 1.0, 1.0, -2.0, 0.5, 0.5]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    got = whiten(values, counts, config("reinforce_pp"))
    np.testing.assert_allclose(got, [(v - mean) / (std + 1e-6) for v in values], rtol=1e-12)


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_whitens_the_whole_step(estimator: str, make_trajectory: Make) -> None:
    groups = [group(make_trajectory, [0.0, 1.0], prompt=0), group(make_trajectory, [1.0, 1.0], prompt=1, total=20)]
    credit = assign_credit(groups, config(estimator))
    raw = [0.0, 1.0, 1.0, 1.0] if estimator == "reinforce_pp" else [-0.5, 0.5, 0.0, 0.0]
    tokens = [v for v, n in zip(raw, (7, 7, 15, 15), strict=True) for _ in range(n)]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    np.testing.assert_allclose(credit.advantages, [(v - mean) / (std + 1e-6) for v in raw], rtol=1e-9, atol=1e-12)


def test_reinforce_pp_takes_groups_of_one(make_trajectory: Make) -> None:
    groups = [group(make_trajectory, [float(p)], prompt=p) for p in range(3)]
    assert len(assign_credit(groups, config("reinforce_pp")).trajectories) == 3


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_group_of_one_is_refused(estimator: str, make_trajectory: Make) -> None:
    with pytest.raises(InvalidFieldError, match=r"Group.size of prompt 3.*got 1.*at least 2, or reinforce_pp"):
        assign_credit([group(make_trajectory, [1.0], prompt=3)], config(estimator))
    with pytest.raises(InvalidFieldError, match="at least 2"):
        group_advantages(np.array([1.0]), config(estimator))


def test_failed_and_unscored_members_are_excluded_and_counted(make_trajectory: Make) -> None:
    members = (
        make_trajectory(member=0, reward=0.0),
        make_trajectory(member=1, reward=None),
        make_trajectory(member=2, reward=0.0, status=Status.FAILED),
        make_trajectory(member=3, reward=1.0),
    )
    credit = assign_credit([Group(prompt_index=0, size=4, trajectories=members)], config("dr_grpo"))
    assert [t.identity.member for t in credit.trajectories] == [0, 3]
    np.testing.assert_allclose(credit.advantages, [-0.5, 0.5])
    assert (credit.excluded, credit.excluded_groups, credit.num_members) == (2, 0, 2)
    np.testing.assert_array_equal(credit.rewards, [0.0, 1.0])


def test_group_with_one_scored_member_is_left_out(make_trajectory: Make) -> None:
    groups = [group(make_trajectory, [1.0, None]), group(make_trajectory, [0.0, 1.0], prompt=1)]
    credit = assign_credit(groups, config("grpo"))
    assert (len(credit.trajectories), credit.excluded, credit.excluded_groups) == (2, 2, 1)


def test_branches_share_one_reward(make_trajectory: Make) -> None:
    members = (
        make_trajectory(member=0, leaf=0, reward=1.0),
        make_trajectory(member=0, leaf=1, reward=1.0),
        make_trajectory(member=1, reward=0.0),
    )
    credit = assign_credit([Group(prompt_index=0, size=2, trajectories=members)], config("dr_grpo"))
    # the baseline counts two members, not three trajectories
    np.testing.assert_allclose(credit.advantages, [0.5, 0.5, -0.5])
    np.testing.assert_array_equal(credit.members, [0, 0, 1])
    torn = (members[0], members[1].replace(reward=0.0), members[2])
    with pytest.raises(InvalidFieldError, match="prompt 0 member 0.*same reward"):
        assign_credit([Group(prompt_index=0, size=2, trajectories=torn)], config("grpo"))


def test_a_failed_branch_excludes_its_member(make_trajectory: Make) -> None:
    members = (
        make_trajectory(member=0, leaf=0, reward=1.0),
        make_trajectory(member=0, leaf=1, reward=None, status=Status.FAILED),
        make_trajectory(member=1, reward=0.0),
        make_trajectory(member=2, reward=1.0),
    )
    credit = assign_credit([Group(prompt_index=0, size=3, trajectories=members)], config("rloo"))
    assert [t.identity.member for t in credit.trajectories] == [1, 2]
    assert credit.excluded == 2


def test_empty_completion_counts_in_the_baseline_only(make_trajectory: Make) -> None:
    members = (
        make_trajectory(member=0, reward=0.0, total=5, start=5),
        make_trajectory(member=1, reward=1.0),
    )
    credit = assign_credit([Group(prompt_index=0, size=2, trajectories=members)], config("dr_grpo"))
    np.testing.assert_allclose(credit.advantages, [0.5])
    assert (credit.num_members, credit.excluded) == (1, 0)


def test_supervised_learning_needs_no_reward(make_trajectory: Make) -> None:
    credit = assign_credit([group(make_trajectory, [None])], config("grpo"), rewarded=False)
    np.testing.assert_array_equal(credit.advantages, [1.0])


def test_no_groups() -> None:
    for estimator in Estimator:
        assert assign_credit([], config(estimator)).trajectories == ()
