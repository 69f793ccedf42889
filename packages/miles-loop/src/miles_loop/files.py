"""Writing files so that a reader never sees half of one, and so that a full disk is named."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_loop.errors import DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | str) -> bool:
    """True for an error (or its text, when it crossed a process) that means: no space left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    text = str(error)
    return any(f"os error {code}" in text or os.strerror(code) in text for code in _FULL)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" into DiskFullError; let other errors pass."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(path) from error
        raise


async def in_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Run what waits for the disk beside the event loop, and to its end also when the caller is cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


def sync_file(path: Path) -> None:
    """Make the bytes of a file (or the entries of a directory) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | Sequence[Any], *, durable: bool = False) -> None:
    """Replace `path` as a whole: readers see the old content or the new, also after a crash of this process.

    Args:
        path: the file.
        data: its new content, as a whole or in pieces (anything that has bytes), which are not put together first.
        durable: wait until the content survives a power cut too. That can take long on a busy disk, so only what
            a checkpoint consists of asks for it.

    Raises:
        DiskFullError: no room; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    pieces: Sequence[Any] = (data,) if isinstance(data, bytes) else data
    try:
        with disk_errors(path):
            with temporary.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), durable=durable)


def remove_tree(path: Path) -> None:
    """Delete a directory; it is renamed first, so that half of it is never mistaken for the whole."""
    if not path.exists():
        return
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
    os.replace(path, trash)
    shutil.rmtree(trash, ignore_errors=True)
