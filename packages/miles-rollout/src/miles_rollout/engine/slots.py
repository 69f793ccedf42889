"""KV slots: one slot holds the keys and values of one token in every layer. Pure bookkeeping, no tensors.

Slot 0 is never handed out: table entries past a sequence's end point at it, so that padded reads find zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError

SlotArray = NDArray[np.int32]


class SlotAllocator:
    """A stack of free slots 1 .. capacity."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidFieldError("SlotAllocator.capacity", capacity, "give room for at least one token")
        self.capacity = capacity
        self._stack = np.arange(capacity, 0, -1, dtype=np.int32)
        self._top = capacity

    @property
    def free_count(self) -> int:
        """Slots that can be handed out now."""
        return self._top

    def take(self, count: int) -> SlotArray:
        """`count` free slots; the caller has checked that there are enough."""
        if count > self._top:
            raise InvalidFieldError("SlotAllocator.take", count, f"only {self._top} slots are free")
        self._top -= count
        return self._stack[self._top : self._top + count].copy()

    def give(self, slots: SlotArray) -> None:
        """Return slots that `take` handed out."""
        count = len(slots)
        if self._top + count > self.capacity:
            raise InvalidFieldError("SlotAllocator.give", count, "slots were returned twice")
        self._stack[self._top : self._top + count] = slots
        self._top += count


class SlotTable:
    """Which slot holds token t of running sequence r: int32 [rows, width], 0 past a sequence's end."""

    def __init__(self, rows: int, width: int) -> None:
        self.slots: SlotArray = np.zeros((rows, width), dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    def take_row(self) -> int:
        """A row of zeros."""
        return self._free.pop()

    def give_row(self, row: int, used: int) -> None:
        """Return a row of which the first `used` entries were set."""
        self.slots[row, :used] = 0
        self._free.append(row)
