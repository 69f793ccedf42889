"""Rewards to advantages: one reward per group member, baselines only inside a group, float64 throughout.

grpo                    (r - mean) / (std + eps), or r - mean without normalisation
dr_grpo                 r - mean (its constant denominator is `Aggregation.CONSTANT`)
rloo                    r - mean of the other members
reinforce_pp            r, then whitened over all trained tokens of the step
reinforce_pp_baseline   r - mean, then whitened over all trained tokens of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_contracts import Group, InvalidFieldError, Status, Trajectory
from miles_trainer.config import AdvantageConfig, Estimator
from miles_trainer.errors import describe

_WHITENED = (Estimator.REINFORCE_PP, Estimator.REINFORCE_PP_BASELINE)


@dataclass(frozen=True)
class Credit:
    """Trajectories that enter the loss, and what each is worth.

    Attributes:
        trajectories: n trajectories that have at least one trained token.
        advantages: float64 [n], the same for every trained token of a trajectory.
        members: int64 [n], ordinal of the group member a trajectory belongs to, 0 .. num_members - 1.
        num_members: members that count in per-trajectory denominators.
        excluded: trajectories left out because their member failed or has no reward.
        excluded_groups: groups left out because fewer than two members remained for a baseline.
        rewards: float64 [num scored members].
    """

    trajectories: tuple[Trajectory, ...]
    advantages: NDArray[np.float64]
    members: NDArray[np.int64]
    num_members: int
    excluded: int
    excluded_groups: int
    rewards: NDArray[np.float64]


def member_reward(trajectories: Sequence[Trajectory]) -> float | None:
    """The one reward of a group member, None when a part of it failed or was not scored.

    Raises:
        InvalidFieldError: its branches carry different rewards.
    """
    if any(t.status is Status.FAILED or t.reward is None for t in trajectories):
        return None
    rewards = {t.reward for t in trajectories}
    if len(rewards) > 1:
        name = describe(trajectories[0].identity)
        raise InvalidFieldError(f"reward of {name}", sorted(map(str, rewards)), "all branches carry the same reward")
    return trajectories[0].reward


def group_advantages(rewards: NDArray[np.float64], config: AdvantageConfig) -> NDArray[np.float64]:
    """Advantages of one group's members before any whitening; float64 in, float64 out.

    Raises:
        InvalidFieldError: a baseline is asked for and there are fewer than two members.
    """
    n = len(rewards)
    if config.estimator is Estimator.REINFORCE_PP:
        return rewards.copy()
    if n < 2:
        raise InvalidFieldError(
            "group size", n, f"{config.estimator} compares members of a group; use at least 2, or reinforce_pp"
        )
    centred: NDArray[np.float64] = rewards - rewards.mean()
    if config.estimator is Estimator.RLOO:
        left_out: NDArray[np.float64] = centred * (n / (n - 1))
        return left_out
    if config.estimator is Estimator.GRPO and config.std_normalization:
        std = rewards.std(ddof=1 if config.std == "unbiased" else 0)
        scaled: NDArray[np.float64] = centred / (std + config.epsilon)
        return scaled
    return centred


def whiten(values: NDArray[np.float64], counts: NDArray[np.int64], config: AdvantageConfig) -> NDArray[np.float64]:
    """Zero mean and unit standard deviation over tokens, where values[i] stands for counts[i] tokens."""
    total = int(counts.sum())
    mean = float((values * counts).sum() / total)
    bessel = 1 if config.std == "unbiased" and total > 1 else 0
    variance = float(((values - mean) ** 2 * counts).sum() / (total - bessel))
    whitened: NDArray[np.float64] = (values - mean) / (np.sqrt(variance) + config.epsilon)
    return whitened


def assign_credit(groups: Sequence[Group], config: AdvantageConfig, *, rewarded: bool = True) -> Credit:
    """Choose the trajectories that are trained and give each its advantage.

    Args:
        groups: groups of the step.
        config: the estimator.
        rewarded: False for supervised learning: rewards are not looked at and every advantage is 1.

    Raises:
        InvalidFieldError: a group of size 1 under an estimator with a baseline, or branches that disagree.
    """
    chosen: list[Trajectory] = []
    advantages: list[float] = []
    members: list[int] = []
    scored: list[float] = []
    excluded = excluded_groups = ordinal = 0
    for group in groups:
        by_member: dict[int, list[Trajectory]] = {}
        for t in group:
            by_member.setdefault(t.identity.member, []).append(t)
        if not rewarded:
            kept = [m for m in by_member.values() if all(t.status is not Status.FAILED for t in m)]
            values = np.ones(len(kept))
        else:
            _check_group_size(group, config)
            rewards = [(m, member_reward(m)) for m in by_member.values()]
            kept = [m for m, r in rewards if r is not None]
            known = np.array([r for _, r in rewards if r is not None], dtype=np.float64)
            if config.estimator.compares and len(kept) < 2:
                excluded_groups += 1
                kept, known = [], known[:0]
            values = group_advantages(known, config) if kept else known
            scored.extend(known.tolist())
        excluded += len(group.trajectories) - sum(map(len, kept))
        for member, value in zip(kept, values.tolist(), strict=True):
            trained = [t for t in member if t.loss_mask.any()]
            chosen.extend(trained)
            advantages.extend([value] * len(trained))
            members.extend([ordinal] * len(trained))
            ordinal += bool(trained)
    result = np.array(advantages, dtype=np.float64)
    if rewarded and config.estimator in _WHITENED and chosen:
        result = whiten(result, np.array([t.num_trained for t in chosen], dtype=np.int64), config)
    return Credit(
        trajectories=tuple(chosen),
        advantages=result,
        members=np.array(members, dtype=np.int64),
        num_members=ordinal,
        excluded=excluded,
        excluded_groups=excluded_groups,
        rewards=np.array(scored, dtype=np.float64),
    )


def _check_group_size(group: Group, config: AdvantageConfig) -> None:
    if group.size < 2 and config.estimator.compares:
        raise InvalidFieldError(
            f"Group.size of prompt {group.prompt_index}",
            group.size,
            f"{config.estimator} compares members of a group; use at least 2, or reinforce_pp",
        )
