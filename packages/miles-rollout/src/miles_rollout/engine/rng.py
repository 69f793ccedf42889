"""Random numbers by counter: the number for token i of a request depends on its seed and i, on nothing else."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
SEED_LIMIT = 1 << 63
"""Seeds are in [0, SEED_LIMIT)."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 bits: element `indices[j]` of the SplitMix64 stream that starts at mix(`seeds[j]`)."""
    state = _mix(seeds + _GOLDEN) + (indices + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SeedSource:
    """Fresh seeds for requests that bring none.

    Args:
        root: makes the sequence of fresh seeds reproducible; None takes it from the operating system.
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = np.array([secrets.randbits(63) if root is None else root], dtype=np.uint64)
        self._count = 0

    def next(self) -> int:
        """A seed not given before."""
        self._count += 1
        word = _mix(self._root + np.array([self._count], dtype=np.uint64) * _GOLDEN)
        return int(word[0] >> np.uint64(1))
