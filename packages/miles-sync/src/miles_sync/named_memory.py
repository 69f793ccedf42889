"""Segments that torch in any process of this host opens by name, without a copy.

    segment  | header | bucket |            header: how many have it open, counted by torch
             /dev/shm/NAME   <--- torch here, torch there

Torch has a small process, the manager, keep what is open: whoever opens a name registers with it. Torch would start it
as a copy of the process that needs it, which would keep open what that process has open, so that nobody noticed its
end. So it is started here, with nothing. It ends by itself after the last process that had such memory open, and
outlives this one while others have: a process whose manager is gone cannot close what it has open, and dies of it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch

from miles_contracts import InvalidFieldError, WeightUpdateError
from miles_sync.segments import Segment

HEADER_BYTES = 64
"""What torch keeps in front of shared memory."""

MOUNT = Path("/dev/shm")
"""Where names of shared memory are looked up; no other mount will do."""

_HOLDERS = 1 << 24
"""Torch removes the file when its count comes to zero. The file is ours to remove, so it never does: every reader
counts itself in and out, and is counted out once more for the reference that it was sent."""

_LONGEST_FOLDER = 70
"""The manager's socket lies some 30 characters below a folder for temporary files, and its name has 107 at most."""

_MANAGER = Path(torch.__file__).parent / "bin" / "torch_shm_manager"


def require_named_memory(directory: Path) -> None:
    """Refuse a folder whose files cannot be opened as shared memory by name.

    Raises:
        InvalidFieldError: naming `directory`.
    """
    if not os.path.samefile(directory, MOUNT):
        raise InvalidFieldError("directory", str(directory), f"handles of host memory need {MOUNT}")


class NamedMemory:
    """Segments as memory that torch passes on by name."""

    def __init__(self) -> None:
        self._opened: WeakKeyDictionary[Segment, torch.Tensor] = WeakKeyDictionary()
        self._manager: subprocess.Popen[bytes] | None = None
        self._address = b""

    def over(self, segment: Segment) -> torch.Tensor:
        """uint8 [capacity - HEADER_BYTES]: the segment behind its header; ready to be passed on once more.

        Raises:
            WeightUpdateError: the manager cannot be started or has ended, torch cannot open the segment, or this torch
                lays shared memory out in another way.
        """
        # Those who did not count themselves out are forgotten.
        segment.array[:4].view(np.int32)[0] = _HOLDERS
        self._require_manager()
        if segment not in self._opened:
            self._opened[segment] = self._open(segment)
        return self._opened[segment]

    def close(self) -> None:
        """Close all; the manager ends when nobody has anything open any more."""
        self._opened.clear()
        if self._manager is not None:
            self._manager.returncode = 0  # it is not ours to wait for: others may have memory open
            self._manager = None

    def _require_manager(self) -> None:
        if self._manager is None:
            self._manager, self._address = _start_manager()
        elif self._manager.poll() is not None:
            # What is open was registered there: it can neither be passed on nor closed.
            raise WeightUpdateError(f"torch_shm_manager ended with {self._manager.returncode}; restart the trainer")

    def _open(self, segment: Segment) -> torch.Tensor:
        size = segment.capacity - HEADER_BYTES
        name = f"/{segment.path.name}".encode()
        try:
            storage = torch.UntypedStorage._new_shared_filename_cpu(self._address, name, size)
        except RuntimeError as error:
            raise WeightUpdateError(f"torch cannot open shared memory by name: {first_line(error)}") from error
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        held = int(segment.array[HEADER_BYTES])
        segment.array[HEADER_BYTES] = held ^ 0xFF
        changed = int(memory[0])
        segment.array[HEADER_BYTES] = held
        if (changed, int(memory[0])) != (held ^ 0xFF, held):
            raise WeightUpdateError(
                f"torch {torch.__version__} has no header of {HEADER_BYTES} bytes before shared memory"
            )
        return memory


def first_line(error: Exception) -> str:
    """An error of torch without the frames of C++ that it adds."""
    return str(error).partition("\n")[0]


def _start_manager() -> tuple[subprocess.Popen[bytes], bytes]:
    """The process and its address. It waits some two seconds for the first to register."""
    try:
        manager = subprocess.Popen(
            [_MANAGER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "TMPDIR": _folder()},
            start_new_session=True,
        )
    except OSError as error:
        raise WeightUpdateError(f"{_MANAGER} cannot be started: {error.strerror}") from error
    assert manager.stdout is not None
    with manager.stdout as answer:
        address = answer.readline().strip()
    if not address.startswith(b"/"):
        manager.wait()
        reason = address.decode(errors="replace").removeprefix("ERROR: ") or f"status {manager.returncode}"
        raise WeightUpdateError(f"torch_shm_manager gives no socket ({reason}); point TMPDIR to a short, writable path")
    return manager, address


def _folder() -> str:
    """Where the manager puts its socket: the folder for temporary files, or a shorter one when that is too deep."""
    usual = tempfile.gettempdir()
    if len(usual) <= _LONGEST_FOLDER:
        return usual
    return next((folder for folder in ("/tmp", "/var/tmp", str(MOUNT)) if os.access(folder, os.W_OK)), usual)
