"""Host memory that is used again once nobody can see it any more.

A page that is touched for the first time is zeroed by the kernel, which costs as much as copying it. A receiver needs
a whole version's memory for every update, and the memory of the version before the last one is free by then.

Nobody has to say when: an array handed out is the only way to its memory, and when the last view of it is gone, in
whatever tensor, the memory comes back by itself. So a version that somebody still holds is never written over.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_contracts.alignment import ALIGNMENT

Bytes = NDArray[np.uint8]

_SMALLEST = 64 * 1024
"""Smaller arrays come from the allocator's own free lists, which is quicker than keeping count of them."""


class _Lease:
    """What arrays over a block have as their base: it lives exactly as long as the last of them."""

    def __init__(self, block: Bytes) -> None:
        self.__array_interface__: dict[str, Any] = block.__array_interface__


class Recycler:
    """Blocks by size, rounded. Updates of one model ask for the same sizes again and again.

    What is kept is bounded by what was in use at one time: before a block of a new size is allocated, at least as
    many bytes of unused ones are given back to the system. May be used from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Bytes]] = {}
        # The end of an array may be noticed anywhere, also inside `take`; this queue may be filled from there.
        self._returned: queue.SimpleQueue[Bytes] = queue.SimpleQueue()

    def take(self, num_bytes: int) -> Bytes:
        """A uint8 array of this many bytes that begins at a cache line; content undefined, nothing else looks at it."""
        if num_bytes < _SMALLEST:
            return _allocate(num_bytes)
        capacity = _rounded(num_bytes)
        with self._lock:
            self._collect()
            fitting = self._free.get(capacity)
            if fitting:
                block = fitting.pop()
            else:
                self._drop(capacity)
                block = _allocate(capacity)
        lease = _Lease(block)
        weakref.finalize(lease, self._returned.put, block).atexit = False
        return np.asarray(lease)[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept and not in use."""
        with self._lock:
            self._collect()
            return sum(size * len(blocks) for size, blocks in self._free.items())

    def _collect(self) -> None:
        while not self._returned.empty():
            block = self._returned.get()
            self._free.setdefault(len(block), []).append(block)

    def _drop(self, num_bytes: int) -> None:
        """Give at least this many bytes of unused blocks back, or all of them."""
        for size in sorted(self._free, reverse=True):
            blocks = self._free[size]
            while blocks and num_bytes > 0:
                blocks.pop()
                num_bytes -= size
            if not blocks:
                del self._free[size]


def _rounded(num_bytes: int) -> int:
    """The next of four sizes to each power of two: buckets that are filled about alike use the same blocks.

    What is added is not touched, and so takes no memory, until something larger is put there.
    """
    step = (1 << (num_bytes.bit_length() - 1)) // 4
    return num_bytes + -num_bytes % step


def _allocate(num_bytes: int) -> Bytes:
    memory = np.empty(num_bytes + ALIGNMENT - 1, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes]
