"""Files in shared memory that never outlive their owner for long.

Every owner holds an advisory lock on `miles-sync-<owner>.lock` for as long as its process lives; the kernel drops it
when the process dies, however it dies. Whoever starts next takes the lock of a dead owner and removes its files.
A lock is used rather than a process id because ids mean nothing across containers that share the mount.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError, WeightUpdateError

PREFIX = "miles-sync-"


class Segment:
    """One shared file, mapped for writing. `array` is its content as uint8 [capacity]."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, capacity, path)
            self._map = mmap.mmap(descriptor, capacity)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def remove(self) -> None:
        """Unlink the file. A reader that has it mapped keeps its bytes until it lets go of them."""
        self.path.unlink(missing_ok=True)
        self.array = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            # Somebody still looks at the bytes; the mapping goes when the last view does.
            return


class SegmentPool:
    """Hands out segments of one directory, keeps returned ones for the next use, removes all at the end.

    Args:
        directory: a shared-memory mount for real use; any folder will do.

    Raises:
        InvalidFieldError: the directory does not exist.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise InvalidFieldError("directory", str(directory), "give an existing folder such as /dev/shm")
        self.directory = directory
        sweep(directory)
        self._owner, self._lock = _take_ownership(directory)
        self._count = 0
        self._free: list[Segment] = []
        self._used: set[Segment] = set()

    def take(self, num_bytes: int) -> Segment:
        """A segment of at least `num_bytes`, content undefined.

        Raises:
            WeightUpdateError: the mount is full.
        """
        fitting = [s for s in self._free if s.capacity >= num_bytes]
        if fitting:
            segment = min(fitting, key=lambda s: s.capacity)
            self._free.remove(segment)
        else:
            if self._free:
                # Too small for this use and every later one of this size: give its memory back first.
                self._free.pop().remove()
            self._count += 1
            capacity = max(num_bytes + -num_bytes % mmap.PAGESIZE, mmap.PAGESIZE)
            segment = Segment(self.directory / f"{PREFIX}{self._owner}-{self._count}.bucket", capacity)
        self._used.add(segment)
        return segment

    def give_back(self, segment: Segment, *, reuse: bool) -> None:
        """Return a segment; `reuse=False` unlinks it because a reader may still have it mapped."""
        self._used.discard(segment)
        if reuse:
            self._free.append(segment)
        else:
            segment.remove()

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that this pool holds now."""
        return sum(s.capacity for s in self._free) + sum(s.capacity for s in self._used)

    def close(self) -> None:
        """Remove every file of this owner. May be called again."""
        for segment in [*self._free, *self._used]:
            segment.remove()
        self._free.clear()
        self._used.clear()
        if self._lock >= 0:
            (self.directory / f"{PREFIX}{self._owner}.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def sweep(directory: Path) -> list[Path]:
    """Remove the files of owners that are dead, and return them."""
    removed: list[Path] = []
    for lock in directory.glob(f"{PREFIX}*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        for path in [*directory.glob(f"{lock.stem}-*.bucket"), lock]:
            path.unlink(missing_ok=True)
            removed.append(path)
        os.close(descriptor)
    return removed


def _take_ownership(directory: Path) -> tuple[str, int]:
    while True:
        owner = secrets.token_hex(8)
        path = directory / f"{PREFIX}{owner}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A sweeper may have seen the file between its creation and our lock and removed it as a dead owner's.
        if os.fstat(descriptor).st_nlink:
            return owner, descriptor
        os.close(descriptor)


def _reserve(descriptor: int, num_bytes: int, path: Path) -> None:
    """Allocate now: a full mount must be an error here and not a SIGBUS at the first write to the mapping."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        free = shutil.disk_usage(path.parent).free
        raise WeightUpdateError(
            f"no room for a bucket of {num_bytes} bytes in {path.parent} ({free} bytes free); "
            "free or enlarge the mount, or use smaller buckets"
        ) from error
