"""Where the elements of canonical tensors lie on the ranks of a group: sharding and fusion as data.

A *canonical* tensor has its Hugging Face name and shape. A *stored* tensor is what a rank really holds: a slice of a
canonical one, several of them behind each other (qkv, gate-up), or a stack (fused experts). A `Fragment` says that
one box of a canonical tensor lies at one place of a stored tensor. That is all that gathering, scattering and
rank-to-rank transfer need to know; nothing here looks at a live tensor or imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from miles_contracts import InvalidFieldError, TensorSpec

Index = tuple[int, ...]


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a canonical tensor inside a stored one.

    Attributes:
        name: the canonical tensor.
        start: first element of the box, one index per canonical dimension.
        shape: extent of the box, none of them 0.
        stored: the stored tensor.
        at: where the box begins in it. A stored tensor may have more leading dimensions than the canonical one;
            the box then has extent 1 in those.
    """

    name: str
    start: Index
    shape: Index
    stored: str
    at: Index

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        total = 1
        for size in self.shape:
            total *= size
        return total


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds. Elements of a stored tensor that no fragment covers are padding."""

    stored: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored tensors, padding included."""
        return sum(spec.num_bytes for spec in self.stored)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A model over the ranks of a group.

    Attributes:
        tensors: the canonical tensors.
        ranks: what each rank holds, by rank number.

    Raises:
        InvalidFieldError: a fragment names an unknown tensor, leaves its box, changes the dtype or overlaps another.
    """

    tensors: tuple[TensorSpec, ...]
    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        canonical = {spec.name: spec for spec in self.tensors}
        for number, rank in enumerate(self.ranks):
            stored = {spec.name: spec for spec in rank.stored}
            taken: dict[str, list[Fragment]] = {}
            for fragment in rank.fragments:
                _check(fragment, canonical, stored, number)
                for other in taken.setdefault(fragment.stored, []):
                    if _overlap(fragment.at, _outer(fragment), other.at, _outer(other)):
                        where = f"ranks[{number}].{fragment.stored}"
                        raise InvalidFieldError(where, fragment.name, f"do not place it over {other.name}")
                taken[fragment.stored].append(fragment)


def whole(specs: Sequence[TensorSpec], ranks: int = 1) -> Layout:
    """Every rank holds every tensor under its canonical name."""
    builder = RankBuilder()
    for spec in specs:
        builder.keep(spec)
    return Layout(tensors=tuple(specs), ranks=(builder.build(),) * ranks)


def split(size: int, index: int, count: int, *, padded: bool = False) -> tuple[int, int, int]:
    """First element, elements and stored elements of one of `count` parts of a dimension.

    Parts have ceil(size / count) elements, the last ones fewer or none, as `torch.chunk` and FSDP2 do it. With
    `padded` every part is stored at full size, as vocabulary-parallel embeddings do it.
    """
    if not 0 <= index < count:
        raise InvalidFieldError("index", index, f"use 0 to {count - 1}")
    part = -(-size // count)
    start = min(index * part, size)
    length = min(part, size - start)
    return start, length, part if padded else length


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a tensor along one dimension: the `index`-th of `count`."""

    spec: TensorSpec
    dim: int = 0
    index: int = 0
    count: int = 1


class RankBuilder:
    """Collects what one rank holds."""

    def __init__(self) -> None:
        self._stored: list[TensorSpec] = []
        self._fragments: list[Fragment] = []

    def build(self) -> RankLayout:
        """The rank's layout, in the order of the calls."""
        return RankLayout(stored=tuple(self._stored), fragments=tuple(self._fragments))

    def keep(self, spec: TensorSpec, stored: str | None = None) -> None:
        """A whole tensor, under another name if given (a tied head that the engine stores twice)."""
        self.shard(Slice(spec=spec), stored=stored)

    def shard(self, part: Slice, *, stored: str | None = None, padded: bool = False) -> None:
        """A part of a tensor."""
        spec, dim = part.spec, part.dim
        if spec.shape and not 0 <= dim < len(spec.shape):
            raise InvalidFieldError("dim", dim, f"{spec.name} has {len(spec.shape)} dimension(s)")
        name = stored if stored is not None else spec.name
        if not spec.shape:
            self._place(name, spec.dtype, (), [(spec, (), (), ())])
            return
        start, length, kept = split(spec.shape[dim], part.index, part.count, padded=padded)
        shape = _with(spec.shape, dim, length)
        origin = _with((0,) * len(spec.shape), dim, start)
        self._place(name, spec.dtype, _with(spec.shape, dim, kept), [(spec, origin, shape, (0,) * len(shape))])

    def concat(self, stored: str, parts: Sequence[Slice]) -> None:
        """Parts behind each other along dimension 0: [q; k; v], [gate; up]. Trailing dimensions are equal."""
        boxes, rows, tails = [], 0, set()
        for part in parts:
            spec = part.spec
            start, length, _ = split(spec.shape[part.dim], part.index, part.count)
            shape, origin = _with(spec.shape, part.dim, length), _with((0,) * len(spec.shape), part.dim, start)
            boxes.append((spec, origin, shape, (rows,) + (0,) * (len(shape) - 1)))
            rows += shape[0]
            tails.add(shape[1:])
        if len(tails) != 1:
            raise InvalidFieldError("parts", sorted(tails), f"all parts of {stored} need the same trailing sizes")
        self._place(stored, parts[0].spec.dtype, (rows, *tails.pop()), boxes)

    def interleave(self, stored: str, parts: Sequence[Slice], groups: int) -> None:
        """Parts cut into `groups` each and dealt group by group: [q0; k0; v0; q1; k1; v1 ...] (Megatron's qkv).

        A part's share of rows must be a multiple of `groups`.
        """
        boxes, rows = [], 0
        tail = parts[0].spec.shape[1:]
        for group in range(groups):
            for part in parts:
                start, length, _ = split(part.spec.shape[0], part.index, part.count)
                if part.dim or length % groups or part.spec.shape[1:] != tail:
                    remedy = f"its share of {length} rows must be a multiple of {groups}, cut along dimension 0"
                    raise InvalidFieldError("parts", part.spec.name, remedy)
                rows_of_one = length // groups
                origin = (start + group * rows_of_one,) + (0,) * len(tail)
                boxes.append((part.spec, origin, (rows_of_one, *tail), (rows,) + (0,) * len(tail)))
                rows += rows_of_one
        self._place(stored, parts[0].spec.dtype, (rows, *tail), boxes)

    def stack(self, stored: str, members: Sequence[Sequence[Slice]]) -> None:
        """Members in a new leading dimension, each its parts behind each other: experts [E, 2I, H], [E, H, I]."""
        boxes, shapes = [], set()
        for number, parts in enumerate(members):
            inner = RankBuilder()
            inner.concat(stored, parts)
            shapes.add(inner._stored[0].shape)
            specs = {part.spec.name: part.spec for part in parts}
            boxes += [(specs[f.name], f.start, f.shape, (number, *f.at)) for f in inner._fragments]
        if len(shapes) != 1:
            raise InvalidFieldError("members", sorted(shapes), f"all members of {stored} need the same shape")
        self._place(stored, members[0][0].spec.dtype, (len(members), *shapes.pop()), boxes)

    def _place(
        self, stored: str, dtype: str, shape: Index, boxes: Iterable[tuple[TensorSpec, Index, Index, Index]]
    ) -> None:
        self._stored.append(TensorSpec(name=stored, dtype=dtype, shape=shape))
        for spec, start, extent, at in boxes:
            if all(extent):
                self._fragments.append(Fragment(name=spec.name, start=start, shape=extent, stored=stored, at=at))


def _with(values: Index, dim: int, value: int) -> Index:
    return (*values[:dim], value, *values[dim + 1 :])


def _outer(fragment: Fragment) -> Index:
    """Extent of the box in the stored tensor's dimensions."""
    return (1,) * (len(fragment.at) - len(fragment.shape)) + fragment.shape


def _overlap(a: Index, a_shape: Index, b: Index, b_shape: Index) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in itertools.zip_longest(a, a_shape, b, b_shape, fillvalue=0))


def _check(fragment: Fragment, canonical: dict[str, TensorSpec], stored: dict[str, TensorSpec], number: int) -> None:
    where = f"ranks[{number}].fragments"
    whole_spec, kept = canonical.get(fragment.name), stored.get(fragment.stored)
    if whole_spec is None or kept is None:
        raise InvalidFieldError(where, fragment.name if whole_spec is None else fragment.stored, "name a known tensor")
    if whole_spec.dtype != kept.dtype:
        raise InvalidFieldError(where, kept.dtype, f"{fragment.name} is {whole_spec.dtype}; layouts do not convert")
    if not _inside(fragment.start, fragment.shape, whole_spec.shape) or not all(fragment.shape):
        raise InvalidFieldError(where, fragment, f"stay inside {fragment.name} {list(whole_spec.shape)}")
    if len(fragment.at) < len(fragment.shape) or not _inside(fragment.at, _outer(fragment), kept.shape):
        raise InvalidFieldError(where, fragment, f"stay inside stored {kept.name} {list(kept.shape)}")


def _inside(start: Index, extent: Index, shape: Index) -> bool:
    return len(start) == len(extent) == len(shape) and all(
        s >= 0 and n >= 0 and s + n <= size for s, n, size in zip(start, extent, shape, strict=True)
    )
