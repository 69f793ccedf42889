"""A routing trace (R3) records which experts each token chose, in the narrowest exact dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_contracts.bitpack import pack_bits, packed_words, unpack_bits
from miles_contracts.errors import InvalidFieldError

_BYTE, _SHORT, _WORD = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)


def narrowest_dtype(num_experts: int) -> np.dtype[Any]:
    """Smallest unsigned dtype that holds expert ids 0 .. num_experts - 1."""
    if not 1 <= num_experts <= 1 << 32:
        raise InvalidFieldError("num_experts", num_experts, "a mixture has at least one expert, and at most 2**32")
    return _BYTE if num_experts <= 1 << 8 else _SHORT if num_experts <= 1 << 16 else _WORD


def id_bits(num_experts: int) -> int:
    """Bits that tell `num_experts` ids apart: ceil(log2(num_experts)), at least 1."""
    return max((num_experts - 1).bit_length(), 1)


def row_digests(expert_ids: NDArray[Any]) -> NDArray[np.uint64]:
    """xxh3_64 of every row of ids [rows, layers, top_k], whatever their integer dtype; uint64 [rows].

    An audit compares the rows that were trained with those an engine sent, without keeping the rows themselves.
    Needs the `digest` extra.

    Raises:
        InvalidFieldError: an id outside [0, 65536).
    """
    from xxhash import xxh3_64_intdigest  # the extra keeps contracts at two dependencies

    rows = np.ascontiguousarray(expert_ids)
    fits = rows.dtype in (np.uint8, np.uint16)
    if not fits and rows.size and (int(rows.min()) < 0 or int(rows.max()) > 0xFFFF):
        raise InvalidFieldError("expert_ids", (int(rows.min()), int(rows.max())), "row digests are of ids < 65536")
    data = rows.astype("<u2").reshape(-1).view(np.uint8).data
    size = 2 * math.prod(rows.shape[1:])
    starts = range(0, len(rows) * size, size) if size else (0 for _ in rows)
    return np.fromiter((xxh3_64_intdigest(data[at : at + size]) for at in starts), np.uint64, len(rows))


class RoutingTrace:
    """Expert ids chosen by each MoE layer; immutable.

    The order of a token's experts is kept: it is the engine's own (by falling score), so that a trace can be
    compared with the engine's answer byte by byte.

    Attributes:
        expert_ids: [rows, layers, top_k] in `narrowest_dtype(num_experts)`, read-only; row t belongs to token t of
            the trajectory. The last token was never fed to the model, so a complete trace has T - 1 rows.
        num_experts: experts per layer.

    Raises:
        InvalidFieldError: another shape or dtype, or an id that is not below `num_experts`.
    """

    __slots__ = ("expert_ids", "num_experts")
    expert_ids: NDArray[Any]
    num_experts: int

    def __init__(self, *, expert_ids: NDArray[Any], num_experts: int) -> None:
        ids, want = expert_ids, narrowest_dtype(num_experts)
        if not isinstance(ids, np.ndarray) or ids.ndim != 3:
            shape = getattr(ids, "shape", type(ids).__name__)
            raise InvalidFieldError("RoutingTrace.expert_ids", shape, "give an array [rows, layers, top_k]")
        if ids.dtype != want:
            raise InvalidFieldError("RoutingTrace.expert_ids", ids.dtype.name, f"use {want.name} (RoutingTrace.of)")
        # a full byte cannot hold an id that is too high: nothing to look at
        if num_experts != 1 << 8 * want.itemsize and ids.size and int(ids.max()) >= num_experts:
            raise InvalidFieldError("RoutingTrace.expert_ids", int(ids.max()), f"ids are < {num_experts}")
        if ids.flags.writeable:
            ids = ids.view()
            ids.flags.writeable = False
        object.__setattr__(self, "expert_ids", ids)
        object.__setattr__(self, "num_experts", num_experts)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"RoutingTrace.{name} cannot be set: a trace is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.expert_ids, self.num_experts)

    def __repr__(self) -> str:
        return f"RoutingTrace({self.num_tokens} rows, {self.num_layers} layers, top-{self.top_k} of {self.num_experts})"

    @classmethod
    def of(cls, expert_ids: NDArray[Any], num_experts: int) -> RoutingTrace:
        """Build from ids of any integer dtype (an array, or what `np.asarray` makes one of); ids outside
        [0, num_experts) are refused, never wrapped."""
        expert_ids = np.asarray(expert_ids)
        if expert_ids.dtype == narrowest_dtype(num_experts):
            return cls(expert_ids=expert_ids, num_experts=num_experts)
        if expert_ids.size and (int(expert_ids.min()) < 0 or int(expert_ids.max()) >= num_experts):
            bad = int(expert_ids.min()) if int(expert_ids.min()) < 0 else int(expert_ids.max())
            raise InvalidFieldError("expert_ids", bad, f"ids are in [0, {num_experts})")
        return cls(expert_ids=expert_ids.astype(narrowest_dtype(num_experts), copy=False), num_experts=num_experts)

    @property
    def num_tokens(self) -> int:
        """Rows, one per token that the model was fed."""
        return int(self.expert_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts chosen per token and layer."""
        return int(self.expert_ids.shape[2])

    @property
    def num_bytes(self) -> int:
        """Bytes of the ids in memory."""
        return int(self.expert_ids.nbytes)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed form."""
        dtype = self.expert_ids.dtype
        return packed_words(self.expert_ids.size, self.bits, dtype) * dtype.itemsize

    @property
    def bits(self) -> int:
        """Bits of an expert id in the packed form."""
        return id_bits(self.num_experts)

    def pack(self) -> NDArray[Any]:
        """The ids at `bits` bits each, as words [..] of the narrowest dtype (`bitpack`); for transport and disk.

        A mixture of 256 experts fills its bytes: its words are the ids themselves, without a copy.
        """
        return pack_bits(self.expert_ids, self.bits)

    @classmethod
    def unpack(cls, words: NDArray[Any], shape: tuple[int, int, int], num_experts: int) -> RoutingTrace:
        """The trace that `pack` packed.

        Args:
            words: what `pack` gave.
            shape: (rows, layers, top_k).
            num_experts: experts per layer.

        Raises:
            InvalidFieldError: words of another dtype or number (truncated), a damaged filling, ids out of range.
        """
        want = narrowest_dtype(num_experts)
        if len(shape) != 3 or any(not isinstance(n, int) or n < 0 for n in shape):
            raise InvalidFieldError("RoutingTrace.shape", shape, "give (rows, layers, top_k)")
        if not isinstance(words, np.ndarray) or words.dtype != want:
            found = words.dtype.name if isinstance(words, np.ndarray) else type(words).__name__
            raise InvalidFieldError("packed routes", found, f"{num_experts} experts are packed in {want.name} words")
        width = id_bits(num_experts)
        ids = unpack_bits(words, width, math.prod(shape)).reshape(shape)
        return cls(expert_ids=ids, num_experts=num_experts)

    def slice(self, start: int, end: int) -> RoutingTrace:
        """Rows start .. end - 1, as a view."""
        if not 0 <= start <= end <= self.num_tokens:
            raise InvalidFieldError("slice", (start, end), f"stay inside [0, {self.num_tokens}]")
        return RoutingTrace(expert_ids=self.expert_ids[start:end], num_experts=self.num_experts)

    @staticmethod
    def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Rows of all traces in order; layers, top_k and num_experts must agree."""
        if not traces:
            raise InvalidFieldError("traces", traces, "give at least one trace")
        kinds = {(t.num_layers, t.top_k, t.num_experts) for t in traces}
        if len(kinds) > 1:
            raise InvalidFieldError("traces", sorted(kinds), "layers, top_k and experts must agree")
        ids = np.concatenate([t.expert_ids for t in traces]) if len(traces) > 1 else traces[0].expert_ids
        return RoutingTrace(expert_ids=ids, num_experts=traces[0].num_experts)


def _rebuild(expert_ids: NDArray[Any], num_experts: int) -> RoutingTrace:
    return RoutingTrace(expert_ids=expert_ids, num_experts=num_experts)
