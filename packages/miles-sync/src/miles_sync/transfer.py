"""Who sends which bytes to whom: a pure function of two layouts.

The plan gives every target rank exactly the bytes of its own shard, each once, and nothing to anybody who does not
need it. Where several source ranks hold the same box, the one with the least to send so far takes it, so that ranks
that hold the same boxes end within one piece of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec
from miles_sync.layout import Fragment, Index, Layout

Offsets = NDArray[np.int64]


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One box from a source rank to a target rank.

    Attributes:
        name: canonical tensor.
        shape: extent of the box.
        source, target: rank numbers.
        source_stored, source_at: where it lies at the source.
        target_stored, target_at: where it belongs at the target.
        num_bytes: of the box.
    """

    name: str
    shape: Index
    source: int
    target: int
    source_stored: str
    source_at: Index
    target_stored: str
    target_at: Index
    num_bytes: int


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All transfers of an update, ordered by target rank and then by the target's fragments."""

    transfers: tuple[Transfer, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that leave the sources."""
        return sum(t.num_bytes for t in self.transfers)

    def sent(self, ranks: int) -> list[int]:
        """Bytes that each source rank sends."""
        return self._sums(ranks, "source")

    def received(self, ranks: int) -> list[int]:
        """Bytes that each target rank receives."""
        return self._sums(ranks, "target")

    def _sums(self, ranks: int, end: str) -> list[int]:
        sums = [0] * ranks
        for transfer in self.transfers:
            sums[getattr(transfer, end)] += transfer.num_bytes
        return sums


def minimum_bytes(target: Layout) -> int:
    """What any transport has to deliver at least: every target rank's shard, without padding."""
    sizes = {spec.name: DTYPE_BYTES[spec.dtype] for spec in target.tensors}
    return sum(f.num_elements * sizes[f.name] for rank in target.ranks for f in rank.fragments)


def plan_transfers(source: Layout, target: Layout) -> TransferPlan:
    """The transfers that fill every target rank from the sources.

    Raises:
        InvalidFieldError: the two sides do not describe the same tensors, the sources do not hold every element, or
            hold a tensor in boxes that overlap without being equal.
    """
    _require_same(source.tensors, target.tensors)
    holders = _Holders(source)
    sizes = {spec.name: DTYPE_BYTES[spec.dtype] for spec in target.tensors}
    load = [0] * len(source.ranks)
    transfers: list[Transfer] = []
    for number, rank in enumerate(target.ranks):
        for wanted in rank.fragments:
            missing = wanted.num_elements
            for box_start, box_shape, replicas in holders.of(wanted.name):
                common = _intersect(wanted.start, wanted.shape, box_start, box_shape)
                if common is None:
                    continue
                start, shape = common
                elements = int(np.prod(shape, dtype=np.int64))
                holder, fragment = min(replicas, key=lambda replica: (load[replica[0]], replica[0]))
                load[holder] += elements * sizes[wanted.name]
                missing -= elements
                transfers.append(
                    Transfer(
                        name=wanted.name,
                        shape=shape,
                        source=holder,
                        target=number,
                        source_stored=fragment.stored,
                        source_at=_moved(fragment, start),
                        target_stored=wanted.stored,
                        target_at=_moved(wanted, start),
                        num_bytes=elements * sizes[wanted.name],
                    )
                )
            if missing:
                raise InvalidFieldError("source", wanted.name, f"the sources lack {missing} element(s) of it")
    return TransferPlan(transfers=tuple(transfers))


def runs(shape: Index, stored: Index, at: Index, item_bytes: int) -> tuple[Offsets, int]:
    """Byte offsets of the contiguous runs of a box in a stored tensor, in row-major order, and their common length.

    Args:
        shape: extent of the box; leading dimensions that the stored tensor has more are of extent 1.
        stored: shape of the stored tensor.
        at: where the box begins in it.
        item_bytes: size of an element.
    """
    extent = (1,) * (len(stored) - len(shape)) + shape
    strides = [item_bytes] * len(stored)
    for dim in range(len(stored) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * stored[dim + 1]
    # Dimensions that the box fills are part of the run; so is the innermost one that it does not fill.
    inner = len(stored)
    length = item_bytes
    while inner > 0:
        inner -= 1
        length *= extent[inner]
        if extent[inner] != stored[inner]:
            break
    offsets = np.zeros((), dtype=np.int64)
    for dim in range(inner):
        steps = (at[dim] + np.arange(extent[dim], dtype=np.int64)) * strides[dim]
        offsets = np.add.outer(offsets, steps)
    base = sum(at[dim] * strides[dim] for dim in range(inner, len(stored)))
    return offsets.reshape(-1) + base, length


def aligned_runs(transfer: Transfer, source: TensorSpec, target: TensorSpec) -> tuple[Offsets, Offsets, int]:
    """Source offsets, target offsets and the common length of the runs of one transfer, in bytes."""
    item = DTYPE_BYTES[source.dtype]
    froms, from_length = runs(transfer.shape, source.shape, transfer.source_at, item)
    tos, to_length = runs(transfer.shape, target.shape, transfer.target_at, item)
    # Both are products of trailing extents, so the shorter one divides the longer one.
    length = min(from_length, to_length)
    return _cut(froms, from_length, length), _cut(tos, to_length, length), length


def _cut(offsets: Offsets, length: int, shorter: int) -> Offsets:
    if length == shorter:
        return offsets
    return np.add.outer(offsets, np.arange(0, length, shorter, dtype=np.int64)).reshape(-1)


class _Holders:
    """For each canonical tensor its distinct boxes and who holds them."""

    def __init__(self, layout: Layout) -> None:
        self._boxes: dict[str, dict[tuple[Index, Index], list[tuple[int, Fragment]]]] = {}
        for number, rank in enumerate(layout.ranks):
            for fragment in rank.fragments:
                boxes = self._boxes.setdefault(fragment.name, {})
                replicas = boxes.setdefault((fragment.start, fragment.shape), [])
                if all(holder != number for holder, _ in replicas):
                    replicas.append((number, fragment))
        for name, boxes in self._boxes.items():
            keys = list(boxes)
            for i, (start, shape) in enumerate(keys):
                for other_start, other_shape in keys[:i]:
                    if _intersect(start, shape, other_start, other_shape) is not None:
                        raise InvalidFieldError("source", name, "hold it in boxes that are equal or do not overlap")

    def of(self, name: str) -> Iterator[tuple[Index, Index, list[tuple[int, Fragment]]]]:
        for (start, shape), replicas in self._boxes.get(name, {}).items():
            yield start, shape, replicas


def _moved(fragment: Fragment, start: Index) -> Index:
    """Where the canonical element `start` lies in the fragment's stored tensor."""
    extra = len(fragment.at) - len(fragment.start)
    inner = tuple(a + s - f for a, s, f in zip(fragment.at[extra:], start, fragment.start, strict=True))
    return fragment.at[:extra] + inner


def _intersect(a: Index, a_shape: Index, b: Index, b_shape: Index) -> tuple[Index, Index] | None:
    start = tuple(max(x, y) for x, y in zip(a, b, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a, a_shape, b, b_shape, strict=True))
    if any(s >= e for s, e in zip(start, end, strict=True)):
        return None
    return start, tuple(e - s for s, e in zip(start, end, strict=True))


def _require_same(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> None:
    a = {s.name: (s.dtype, s.shape) for s in ours}
    b = {s.name: (s.dtype, s.shape) for s in theirs}
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            raise InvalidFieldError("tensors", name, f"sources have {a.get(name)}, targets {b.get(name)}")
