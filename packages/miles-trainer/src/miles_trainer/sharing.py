"""Members of a group start with the same prompt: its tokens are computed once and attended to by all.

The result is the same, since a prefix neither sees nor depends on what follows it. For a mixture of experts
with replay the recorded routes of the prefix have to be the same too; members whose routes differ are not joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miles_contracts import Trajectory

Ints = NDArray[np.int64]

_SHORTEST = 4
"""Fewer common tokens are not worth a chunk of their own."""
_LONGEST_ROW = 1024
"""Joined rows need an explicit attention mask; beyond this many tokens the mask costs more than the prompt."""


def common_prefixes(trajectories: Sequence[Trajectory], fed: Ints) -> tuple[Ints, Ints]:
    """Common prefixes of trajectories of one prompt.

    Args:
        trajectories: S trajectories.
        fed: int64 [S], tokens of each that are fed to the model.

    Returns:
        For each trajectory the length of the prefix it shares (0: none) and the trajectory that stands for it.
    """
    lengths = np.zeros(len(trajectories), dtype=np.int64)
    leaders = np.arange(len(trajectories), dtype=np.int64)
    families: dict[int, list[int]] = {}
    for index, t in enumerate(trajectories):
        if fed[index] <= _LONGEST_ROW:
            families.setdefault(t.identity.prompt_index, []).append(index)
    for members in families.values():
        if len(members) < 2:
            continue
        width = int(fed[members].min())
        if width < _SHORTEST:
            continue
        first = trajectories[members[0]]
        same = np.stack([trajectories[i].token_ids[:width] for i in members]) == first.token_ids[:width]
        for row, i in zip(same, members, strict=True):
            row &= _same_routes(first, trajectories[i], width)
        everywhere = same.all(axis=0)
        common = width if everywhere.all() else int(everywhere.argmin())
        if common >= _SHORTEST:
            lengths[members] = common
            leaders[members] = members[0]
    return lengths, leaders


def _same_routes(a: Trajectory, b: Trajectory, width: int) -> NDArray[np.bool_]:
    """Where the first `width` rows of two traces are equal; True where there are no traces."""
    if a.routing is None and b.routing is None:
        return np.ones(width, dtype=np.bool_)
    if a.routing is None or b.routing is None or a.routing.expert_ids.shape[1:] != b.routing.expert_ids.shape[1:]:
        return np.zeros(width, dtype=np.bool_)
    equal: NDArray[np.bool_] = (a.routing.expert_ids[:width] == b.routing.expert_ids[:width]).all(axis=(1, 2))
    return equal
