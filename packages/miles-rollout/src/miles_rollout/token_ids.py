"""A long prompt that is known in pieces, so that a turn touches only what is new in it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec
import numpy as np
from numpy.typing import NDArray


def json_items(ids: NDArray[np.int32]) -> bytes:
    """The elements of a JSON array of ids, without its brackets; empty for none."""
    return msgspec.json.encode(ids.tolist())[1:-1]


def ids_crc(ids: NDArray[np.int32], before: int = 0) -> int:
    """CRC-32 of int32 little-endian ids that follow others whose CRC-32 is `before`."""
    return zlib.crc32(np.ascontiguousarray(ids, dtype="<i4").data, before)


class TokenIds(Sequence[int]):
    """Ids as a sequence of plain integers, as an array, as JSON and as a checksum.

    Args:
        pieces: int32 [N] each, together all ids.
        items: what `json_items` gives for consecutive parts of the ids, together all of them.
        crc: CRC-32 of all ids (`ids_crc`).
        length: how many they are, if that is known.
    """

    __slots__ = ("_items", "_length", "_pieces", "crc")

    def __init__(
        self,
        pieces: Sequence[NDArray[np.int32]] = (),
        items: Sequence[bytes] = (),
        crc: int = 0,
        length: int | None = None,
    ) -> None:
        self.crc = crc
        self._pieces = pieces
        self._items = items
        self._length = sum(len(piece) for piece in pieces) if length is None else length

    @property
    def array(self) -> NDArray[np.int32]:
        """int32 [T], a copy of all ids."""
        return np.concatenate([np.empty(0, dtype=np.int32), *self._pieces])

    @property
    def json(self) -> bytes:
        """The ids as a JSON array."""
        return b"[" + b",".join([piece for piece in self._items if piece]) + b"]"

    def extended(self, more: NDArray[np.int32]) -> TokenIds:
        """These ids and `more` behind them."""
        items, length = [*self._items, json_items(more)], self._length + len(more)
        return TokenIds([*self._pieces, more], items, ids_crc(more, self.crc), length)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            return self._between(start, stop) if step == 1 else self.array[at].tolist()
        index = range(self._length)[at]
        return self._between(index, index + 1)[0]

    def _between(self, start: int, stop: int) -> list[int]:
        """Ids from `start` to `stop`; looked for from the end, where readers of a history read."""
        found: list[list[int]] = []
        end = self._length
        for piece in reversed(self._pieces):
            begin = end - len(piece)
            if begin < stop:
                found.append(piece[max(start - begin, 0) : stop - begin].tolist())
            if begin <= start:
                break
            end = begin
        return [i for part in reversed(found) for i in part]
