"""Unbiased estimates from n samples of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_contracts import InvalidFieldError


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is correct: 1 - C(n - c, k) / C(n, k).

    Args:
        samples: n, samples that were drawn.
        correct: c, how many of them were correct.
        k: draws, at most n.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise InvalidFieldError("pass@k", (samples, correct, k), "need 0 <= correct <= samples and 1 <= k <= samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_at_k(rewards: Sequence[float], k: int) -> float:
    """Mean reward of the first `k` samples."""
    if not 1 <= k <= len(rewards):
        raise InvalidFieldError("mean@k", k, f"there are {len(rewards)} samples")
    return math.fsum(rewards[:k]) / k
