"""Who sends which bytes to whom: a pure function of two layouts.

The plan gives every target rank exactly the bytes of its own shard, each once, and nothing to anybody who does not
need it. Where several source ranks hold the same box, large ones are divided between them and small ones go to the one
with the least to send so far, so that ranks that hold the same boxes end within one small box of each other. Whoever
sends a part of a box sends it to all target ranks that want it, and so reads it once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec
from miles_sync.layout import Fragment, Index, Layout

Offsets = NDArray[np.int64]

DIVIDED_BYTES = 2**20
"""From this size on a box is divided between the sources that hold it: below, a message costs more than its bytes."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A box as one source rank holds it.

    Attributes:
        rank: its number.
        stored, at: where the box begins in which stored tensor.
    """

    rank: int
    stored: str
    at: Index


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One box from a source rank to a target rank.

    Attributes:
        name: canonical tensor.
        shape: extent of the box.
        source, target: rank numbers.
        source_stored, source_at: where it lies at the source.
        target_stored, target_at: where it belongs at the target.
        num_bytes: of the box.
        confirmer: another source that holds the same box and can say whether its bytes are the same; None where there
            is no other.
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
    confirmer: Copy | None = None


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


def plan_transfers(
    source: Layout, target: Layout, divided_bytes: int = DIVIDED_BYTES, *, home: int | None = None
) -> TransferPlan:
    """The transfers that fill every target rank from the sources.

    Args:
        source, target: layouts of both sides.
        divided_bytes: size from which a box is divided between the sources that hold it, along its first dimension
            that has an extent.
        home: source rank that is where the targets are: what it holds comes from nobody else.

    Raises:
        InvalidFieldError: the two sides do not describe the same tensors, the sources do not hold every element, or
            hold a tensor in boxes that overlap without being equal.
    """
    _require_same(source.tensors, target.tensors)
    wanted = _wanted(_Holders(source), target)
    sizes = {spec.name: DTYPE_BYTES[spec.dtype] for spec in target.tensors}
    times = Counter(want.key for want in wanted)
    division = _Division(len(source.ranks), divided_bytes, home)
    parts: dict[_Key, list[_Part]] = {}
    transfers: list[Transfer] = []
    for want in wanted:
        key = want.key
        if key not in parts:
            parts[key] = division.parts(want, sizes[want.fragment.name], times[key])
        transfers += [
            Transfer(
                name=want.fragment.name,
                shape=part.shape,
                source=part.sender.rank,
                target=want.target,
                source_stored=part.sender.stored,
                source_at=part.sender.at,
                target_stored=want.fragment.stored,
                target_at=_moved(want.fragment, part.start),
                num_bytes=part.num_bytes,
                confirmer=part.confirmer,
            )
            for part in parts[key]
        ]
    return TransferPlan(transfers=tuple(transfers))


_Key = tuple[str, Index, Index]


class _Wanted(NamedTuple):
    """A box that a target rank wants and that some sources hold."""

    target: int
    fragment: Fragment
    start: Index
    shape: Index
    holders: list[tuple[int, Fragment]]

    @property
    def key(self) -> _Key:
        return self.fragment.name, self.start, self.shape


class _Part(NamedTuple):
    """A part of a box, who sends it and who confirms it."""

    start: Index
    shape: Index
    num_bytes: int
    sender: Copy
    confirmer: Copy | None


def _wanted(holders: _Holders, target: Layout) -> list[_Wanted]:
    found = []
    for number, rank in enumerate(target.ranks):
        for fragment in rank.fragments:
            missing = fragment.num_elements
            for box_start, box_shape, replicas in holders.of(fragment.name):
                common = _intersect(fragment.start, fragment.shape, box_start, box_shape)
                if common is not None:
                    start, shape = common
                    missing -= math.prod(shape)
                    found.append(_Wanted(number, fragment, start, shape, replicas))
            if missing:
                raise InvalidFieldError("source", fragment.name, f"the sources lack {missing} element(s) of it")
    return found


class _Division:
    """Gives each source its parts; remembers what it has to send already.

    Args:
        ranks: number of sources.
        divided_bytes: size from which boxes are divided.
        home: the source that sends all it holds, None if there is none such.
    """

    def __init__(self, ranks: int, divided_bytes: int, home: int | None) -> None:
        self._load = [0] * ranks
        self._divided_bytes, self._home = divided_bytes, home

    def parts(self, want: _Wanted, item_bytes: int, times: int) -> list[_Part]:
        """The parts of a box that is sent `times` times, the largest to who has the least to send."""
        replicas = sorted(want.holders, key=lambda h: (h[0] != self._home, self._load[h[0]], h[0]))
        total = math.prod(want.shape) * item_bytes
        count = len(replicas) if total >= self._divided_bytes and replicas[0][0] != self._home else 1
        made = []
        for number, (start, shape) in enumerate(_rows(want.start, want.shape, count)):
            sender, fragment = replicas[number]
            other, others = replicas[(number + 1) % len(replicas)]
            num_bytes = math.prod(shape) * item_bytes
            self._load[sender] += num_bytes * times
            confirmer = Copy(rank=other, stored=others.stored, at=_moved(others, start)) if other != sender else None
            copy = Copy(rank=sender, stored=fragment.stored, at=_moved(fragment, start))
            made.append(_Part(start, shape, num_bytes, copy, confirmer))
        return made


def _rows(start: Index, shape: Index, count: int) -> Iterator[tuple[Index, Index]]:
    """At most `count` parts of a box, of almost equal size, larger ones first; each is contiguous in the box."""
    dim = next((d for d, extent in enumerate(shape) if extent > 1), None)
    if dim is None or count == 1:
        yield start, shape
        return
    count = min(count, shape[dim])
    first = start[dim]
    for number in range(count):
        extent = shape[dim] // count + (number < shape[dim] % count)
        yield (*start[:dim], first, *start[dim + 1 :]), (*shape[:dim], extent, *shape[dim + 1 :])
        first += extent


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
