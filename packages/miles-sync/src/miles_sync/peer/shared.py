"""Peers on one host: the region is a file in shared memory, a write is a copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from miles_contracts import WeightUpdateError
from miles_sync.peer.memory import Write
from miles_sync.runs import Bytes, put_runs
from miles_sync.segments import SegmentPool

_PREFIX = "shm:"


class SharedBackend:
    """Regions under `directory`, a shared-memory mount."""

    def __init__(self, directory: Path = Path("/dev/shm")) -> None:
        self._directory = directory

    def expose(self, num_bytes: int) -> SharedMemory:
        """A region in a file that goes with this process."""
        return SharedMemory(self._directory, num_bytes)

    def writer(self) -> SharedWriter:
        """Maps regions of this host."""
        return SharedWriter()


class SharedMemory:
    """A region of this process."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._pool = SegmentPool(directory)
        self._segment = self._pool.take(num_bytes)
        self.handle = f"{_PREFIX}{num_bytes}:{self._segment.path}"
        self.data: Bytes = self._segment.array[:num_bytes]

    def close(self) -> None:
        """Remove the file."""
        self.data = np.empty(0, np.uint8)
        self._pool.close()


class SharedWriter:
    """Maps a region at its first use and keeps it mapped."""

    def __init__(self) -> None:
        self._mapped: dict[str, Bytes] = {}

    def write(self, handle: str, writes: Sequence[Write]) -> None:
        """Copy into the region.

        Raises:
            WeightUpdateError: the region is gone, or a write leaves it.
        """
        region = self._mapped.get(handle)
        if region is None:
            region = self._mapped[handle] = _map(handle)
        for write in writes:
            low, high = int(write.offsets.min()), int(write.offsets.max()) + write.length
            if low < 0 or high > len(region):
                raise WeightUpdateError(f"a write leaves the region {handle} of {len(region)} bytes")
            put_runs(region, write.offsets, write.length, write.data)

    def keep(self, handles: Collection[str]) -> None:
        """Unmap the others: a file whose owner has removed it is freed with its last mapping."""
        self._mapped = {handle: region for handle, region in self._mapped.items() if handle in handles}

    def close(self) -> None:
        """Unmap."""
        self._mapped.clear()


def _map(handle: str) -> Bytes:
    size, _, path = handle.removeprefix(_PREFIX).partition(":")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise WeightUpdateError(f"peer memory {handle} is gone: {error.strerror}") from error
    try:
        # The file is a whole number of pages; the region ends where its owner says.
        return np.frombuffer(mmap.mmap(descriptor, int(size)), np.uint8)
    finally:
        os.close(descriptor)
