"""A long prompt whose JSON text is known in pieces, so that a turn encodes only what is new in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec
import numpy as np
from numpy.typing import NDArray


def json_items(ids: NDArray[np.int32]) -> bytes:
    """The elements of a JSON array of ids, without its brackets; empty for none."""
    return msgspec.json.encode(ids.tolist())[1:-1]


class TokenIds(Sequence[int]):
    """Ids as a sequence of plain integers, as an array and as JSON.

    Args:
        array: int32 [T], all of them.
        items: what `json_items` gives for consecutive pieces of `array`, together all of it.
    """

    __slots__ = ("_items", "array")

    def __init__(self, array: NDArray[np.int32], items: Sequence[bytes]) -> None:
        self.array = array
        self._items = items

    @property
    def json(self) -> bytes:
        """The ids as a JSON array."""
        return b"[" + b",".join([piece for piece in self._items if piece]) + b"]"

    def extended(self, more: NDArray[np.int32]) -> TokenIds:
        """These ids and `more` behind them."""
        return TokenIds(np.concatenate((self.array, more)), [*self._items, json_items(more)])

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        found = self.array[at]
        return found.tolist() if isinstance(at, slice) else int(found)
