"""Where publications lie: a few calls that a folder and an object store can both offer.

A write becomes visible whole or not at all. A folder gets that from a rename after fsync, an object store from its
put; nothing else (no directory rename, no append, no lock) is asked of a store.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from miles_contracts import InvalidFieldError, WeightUpdateError

_TEMPORARY = ".tmp-"


class Store(Protocol):
    """Blobs under keys like `a/b`. A blob is written once and not changed; a pointer is replaced."""

    def put(self, key: str, pieces: Iterable[bytes | bytearray]) -> None:
        """Write a blob, durable and visible when this returns, or not at all."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a blob; fewer than asked for when it is shorter. FileNotFoundError when it is not there."""

    def names(self) -> list[str]:
        """All keys, sorted."""

    def delete(self, key: str) -> None:
        """Remove a blob; nothing happens when it is not there."""


class FolderStore:
    """A plain shared folder.

    Raises:
        InvalidFieldError: the folder does not exist.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise InvalidFieldError("root", str(root), "give an existing folder")
        self.root = root

    def put(self, key: str, pieces: Iterable[bytes | bytearray]) -> None:
        """Write through a temporary file, fsync, rename, fsync of the folder.

        Raises:
            WeightUpdateError: the disk is full; nothing is left behind.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, pieces)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def names(self) -> list[str]:
        found = [p for p in self.root.rglob("*") if p.is_file() and not p.name.startswith(_TEMPORARY)]
        return sorted(p.relative_to(self.root).as_posix() for p in found)

    def delete(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        if path.parent != self.root and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(parts) or any(part in (".", "..") or part.startswith(_TEMPORARY) for part in parts):
            raise InvalidFieldError("key", key, "use names joined by '/', without '.', '..' or empty ones")
        return self.root.joinpath(*parts)


def write_durably(path: Path, pieces: Iterable[bytes | bytearray]) -> None:
    """Replace `path` by these bytes so that after a crash it is the old file or the whole new one.

    Raises:
        WeightUpdateError: the disk is full.
    """
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise as_full_disk(error, path) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def as_full_disk(error: OSError, path: Path) -> Exception:
    """`error`, or the clear form of it when it says that the disk is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = shutil.disk_usage(path.parent).free
    return WeightUpdateError(f"the disk of {path.parent} is full ({free} bytes free) while writing {path.name}")


def sync_folder(path: Path) -> None:
    """fsync of a folder, so that a rename in it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
