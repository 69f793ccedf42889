"""Which bytes travel in which bucket: a pure function of names, dtypes and shapes, never of live tensors.

A plan made from metadata is the same on every rank, before any weight exists, and whatever the weights' current
residence (an offloaded parameter has the shape it will have, not zero elements).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec
from miles_contracts.alignment import ALIGNMENT, aligned

DEFAULT_BUCKET_BYTES = 512 * 1024 * 1024

_EXPERT = re.compile(r"\.experts(\.|$)")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive bytes of one tensor inside one bucket.

    Attributes:
        spec: the whole tensor.
        start: first byte of the piece in the contiguous tensor.
        num_bytes: length of the piece.
        offset: where it lies in the bucket, a multiple of the alignment that was planned with.
    """

    spec: TensorSpec
    start: int
    num_bytes: int
    offset: int

    @property
    def whole(self) -> bool:
        """True when the piece is the complete tensor."""
        return self.num_bytes == self.spec.num_bytes


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """What one bucket holds: several whole tensors, or one piece of a tensor that is larger than a bucket."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes from the bucket's start to the end of its last piece, alignment gaps included."""
        return max((p.offset + p.num_bytes for p in self.pieces), default=0)

    @property
    def split(self) -> bool:
        """True when the bucket is one part of a larger tensor."""
        return len(self.pieces) == 1 and not self.pieces[0].whole


def is_expert(name: str) -> bool:
    """True for the parameters of routed experts (not for the router, nor for shared experts)."""
    return _EXPERT.search(name) is not None


def plan_buckets(
    specs: Sequence[TensorSpec],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    experts_apart: bool = False,
    packed: bool = False,
    split: bool = True,
) -> tuple[Bucket, ...]:
    """Lay tensors into buckets of at most `bucket_bytes`, in the given order.

    A bucket is closed when the next tensor would not fit. A tensor larger than a bucket is split along its bytes,
    each part in a bucket of its own.

    Args:
        specs: the tensors, names unique.
        bucket_bytes: capacity of a bucket; rounded down to a multiple of `ALIGNMENT`.
        experts_apart: put routed experts after everything else and never into the same bucket, for layouts
            in which the two are gathered over different groups of ranks.
        packed: without gaps between tensors, as SGLang's flattened buckets are; a bucket is also closed when the
            next tensor would begin at a byte that its dtype cannot begin at.
        split: False gives a tensor larger than a bucket a bucket of its own size, for receivers that take whole
            tensors only.

    Raises:
        InvalidFieldError: the capacity is smaller than one aligned unit, or a name occurs twice.
    """
    if bucket_bytes < ALIGNMENT:
        raise InvalidFieldError("bucket_bytes", bucket_bytes, f"use at least {ALIGNMENT} bytes")
    _refuse_duplicates(spec.name for spec in specs)
    capacity = bucket_bytes - bucket_bytes % ALIGNMENT
    if experts_apart:
        runs = [[s for s in specs if not is_expert(s.name)], [s for s in specs if is_expert(s.name)]]
    else:
        runs = [list(specs)]
    filled = [pieces for run in runs for pieces in _pack(run, capacity, packed, split)]
    return tuple(Bucket(index=i, pieces=tuple(pieces)) for i, pieces in enumerate(filled))


def _pack(specs: Sequence[TensorSpec], capacity: int, packed: bool, split: bool) -> Iterator[list[Piece]]:
    open_pieces: list[Piece] = []
    end = 0
    for spec in specs:
        size = spec.num_bytes
        if size > capacity and split:
            if open_pieces:
                yield open_pieces
                open_pieces, end = [], 0
            for start in range(0, size, capacity):
                yield [Piece(spec=spec, start=start, num_bytes=min(capacity, size - start), offset=0)]
            continue
        offset = end if packed else aligned(end)
        if open_pieces and (offset + size > capacity or offset % DTYPE_BYTES[spec.dtype]):
            yield open_pieces
            open_pieces, offset = [], 0
        open_pieces.append(Piece(spec=spec, start=0, num_bytes=size, offset=offset))
        end = offset + size
    if open_pieces:
        yield open_pieces


def _refuse_duplicates(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidFieldError("specs", name, "give every tensor once; tied weights under one name")
        seen.add(name)
