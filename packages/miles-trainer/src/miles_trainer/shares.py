"""What each rank of a trainer group trains in a step: whole trajectories, as many tokens as the others'.

Credit and token weights are decided over the whole step before it is divided, so a share only has to be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_contracts import Trajectory

_SLACK = 1.05
"""Trajectories of one prompt stay together, to share it, while the fullest rank gets at most so much more by that."""


@dataclass(frozen=True)
class Share:
    """The part of a step that one rank trains.

    Attributes:
        trajectories: n of them, possibly none.
        advantages: float64 [n].
        weights: float64 [n], weight of each trained token in the loss of the whole step.
        num_trained: trained tokens of the whole step.
        num_members: group members of the whole step.
    """

    trajectories: tuple[Trajectory, ...]
    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]
    num_trained: int
    num_members: int


@dataclass(frozen=True)
class Step:
    """One update, prepared.

    Attributes:
        shares: one a rank.
        metrics: of the batch as a whole, known before anything is trained.
    """

    shares: tuple[Share, ...]
    metrics: dict[str, float]


def divide(trajectories: Sequence[Trajectory], ranks: int) -> list[list[int]]:
    """Which trajectories each rank trains, as indices in their order; the same on every rank that computes it.

    The longest unit goes to the emptiest rank, then the next: no rank gets more than 4/3 of what is unavoidable.
    Units are the trajectories of one prompt while that does not cost balance, else lone trajectories.
    """
    if ranks == 1:
        return [list(range(len(trajectories)))]
    sizes = [t.num_tokens for t in trajectories]
    families: dict[int, list[int]] = {}
    for index, t in enumerate(trajectories):
        families.setdefault(t.identity.prompt_index, []).append(index)
    together = _spread(list(families.values()), sizes, ranks)
    apart = _spread([[index] for index in range(len(sizes))], sizes, ranks)
    return together if _fullest(together, sizes) <= _SLACK * _fullest(apart, sizes) else apart


def _spread(units: Sequence[list[int]], sizes: Sequence[int], ranks: int) -> list[list[int]]:
    filled, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    weights = [sum(sizes[i] for i in unit) for unit in units]
    for index in sorted(range(len(units)), key=lambda i: -weights[i]):
        rank = filled.index(min(filled))
        shares[rank] += units[index]
        filled[rank] += weights[index]
    return [sorted(share) for share in shares]


def _fullest(shares: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    return max(sum(sizes[i] for i in share) for share in shares)
