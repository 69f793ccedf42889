"""Memory of a target rank that other processes write into, and what a backend has to offer for it.

All stored tensors of a rank lie in one arena at offsets that follow from its layout, so a sender needs one handle per
rank and no lookups. A write is one-sided: the target's code takes no part in it and does not know of it; digests
through the control plane are what make it count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from miles_contracts import TensorSpec
from miles_contracts.alignment import ALIGNMENT, aligned
from miles_sync.layout import RankLayout
from miles_sync.runs import Bytes, Offsets


class Arena:
    """Offsets of a rank's stored tensors in one region."""

    def __init__(self, layout: RankLayout) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.offsets: dict[str, int] = {}
        end = 0
        for spec in layout.stored:
            self.specs[spec.name], self.offsets[spec.name] = spec, end
            end += aligned(spec.num_bytes)
        self.num_bytes = max(end, ALIGNMENT)


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes for one region: `data` is cut into runs of `length` and goes to `offsets`, in order.

    Attributes:
        data: uint8 [len(offsets) * length].
        offsets: int64, first byte of each run in the region; at least one.
        length: bytes of a run.
    """

    data: Bytes
    offsets: Offsets
    length: int


class PeerMemory(Protocol):
    """A region of this process that others may write."""

    @property
    def handle(self) -> str:
        """What a writer needs to reach it; a line of text for the control plane."""

    @property
    def data(self) -> Bytes:
        """The region, uint8 [num_bytes]."""

    def close(self) -> None:
        """Others can no longer write."""


class PeerWriter(Protocol):
    """The writing side."""

    def write(self, handle: str, writes: Sequence[Write]) -> None:
        """Write into a region; returns when all bytes are there.

        Raises:
            WeightUpdateError: the peer is gone or refused, or the deadline passed. What was written is undefined.
        """

    def keep(self, handles: Collection[str]) -> None:
        """Let go of all other regions: they have been replaced, and what is still held of them only costs memory."""

    def close(self) -> None:
        """Let go of all regions."""


class PeerBackend(Protocol):
    """A way to write into another process' memory."""

    def expose(self, num_bytes: int) -> PeerMemory:
        """A new region of this process."""

    def writer(self) -> PeerWriter:
        """A writer of this process."""
