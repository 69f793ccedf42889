"""Where bytes of arrays and tensors begin, on the wire and in memory that is passed on."""

from __future__ import annotations

ALIGNMENT = 64
"""A cache line, enough for any dtype or vector load, and what torch's own allocations begin at: kernels may add up in
another order at other addresses."""


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return num_bytes + -num_bytes % ALIGNMENT
