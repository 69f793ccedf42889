"""Engines and trainer as forks of one process that has done their imports.

Nearly all that such a process does before it loads a model, and most of the memory that it takes, is the import of
torch and transformers. One process does that once, and each of them is a copy of it: they start at once and share what
was imported.

    driver --- starts ---> zygote: imports, says so, then waits
           --- asks -----> zygote --- forks ---> (ends at once) --- forks ---> child

A child whose parent has ended is given to the driver by the kernel (the driver is a subreaper at that moment), so it is
the driver's child like any other: its end is the driver's to see, and its guard the same (`miles_loop.child`). Whatever
goes wrong here, the child is started in the ordinary way.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from miles_loop.processes import ProcessSpec, child_environment

_log = logging.getLogger(__name__)
MODULES = ("miles_rollout.engine", "miles_loop.trainer_process")
"""What is forked."""
IMPORTS = (
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "miles_rollout.engine.cli",
    "miles_rollout.engine.loading",
    "miles_rollout.engine.server",
    "miles_loop.senders",
    "miles_loop.trainer_team",
    "miles_trainer.trainer",
)
"""What those modules import, themselves left out (each runs as `__main__` of its process), and what models import."""
_PROCESS = "miles_loop.zygote_process"
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where one of these is, imports may look for devices, and a driver that was asked for them is of no use in a fork."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux."""
_FORK_S = 10.0
"""Longest wait for one fork, which takes milliseconds."""
_MAX_REPLY = 4096


class Request(msgspec.Struct, frozen=True):
    """What to fork; the descriptors that come with it are the log, then those of `descriptors`.

    Attributes:
        arguments: of `miles_loop.child`.
        environment: all of it.
        descriptors: the numbers that the arguments know them by.
    """

    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]


class Reply(msgspec.Struct, frozen=True):
    """The child's process id, or what went wrong."""

    pid: int = 0
    error: str = ""


class ZygoteError(Exception):
    """The zygote could not do it."""


def can_fork() -> bool:
    """Whether this machine allows it: Linux, a kernel that tells the end of any process, and no accelerator."""
    if sys.platform != "linux" or any(Path(device).exists() for device in _ACCELERATORS):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Zygote:
    """The process, from its start until `close`.

    Args:
        threads: CPU threads of its children.
        modules: what it may fork.
        imports: what it imports.
    """

    def __init__(self, threads: int = 1, modules: Sequence[str] = MODULES, imports: Sequence[str] = IMPORTS) -> None:
        self._threads = threads
        self._modules = modules
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROCESS, str(theirs.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what cannot be imported is said by the process that is then started
                env=child_environment(ProcessSpec(name="zygote", module=_PROCESS, threads=threads)),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ready: asyncio.Future[bool] | None = None
        self._closed = False

    async def start(self, spec: ProcessSpec, log: int, passed: Sequence[int]) -> Adopted | None:
        """Fork a child once everything is imported; None where it has to be started in the ordinary way.

        Args:
            spec: what it runs.
            log: descriptor of the file that it writes to.
            passed: descriptors that it inherits under the same numbers; the first two are those of its guard.
        """
        if self._closed or spec.module not in self._modules:
            return None
        if spec.python is not None or spec.environment or spec.threads != self._threads:
            return None  # these count when an interpreter starts, and when libraries are loaded
        try:
            if not await self._is_ready():
                raise ZygoteError("it ended before it was ready")
            return Adopted(self._fork(spec, log, passed))
        except (OSError, msgspec.MsgspecError, ZygoteError) as error:
            _log.warning("process %s is started without the zygote: %s", spec.name, error)
            if not isinstance(error, ZygoteError):
                # What it says or forks later would be taken for the answer to another request.
                self.close()
            return None

    async def _is_ready(self) -> bool:
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            loop.add_reader(self._socket, self._tell)
        return await asyncio.shield(self._ready)

    def _tell(self) -> None:
        assert self._ready is not None
        self._ready.get_loop().remove_reader(self._socket)
        try:
            said = self._socket.recv(1)
        except OSError:
            said = b""
        self._ready.set_result(bool(said))

    def _fork(self, spec: ProcessSpec, log: int, passed: Sequence[int]) -> int:
        """The child's process id. Nothing else must run meanwhile: what loses its parent then becomes ours."""
        arguments = [f"{passed[0]},{passed[1]}", spec.module, *spec.arguments]
        request = Request(arguments=arguments, environment=child_environment(spec), descriptors=list(passed))
        self._socket.settimeout(_FORK_S)
        _be_subreaper(True)
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], [log, *passed])
            reply = msgspec.msgpack.decode(self._socket.recv(_MAX_REPLY), type=Reply)
        finally:
            _be_subreaper(False)
        if not reply.pid:
            raise ZygoteError(reply.error)
        return reply.pid

    def close(self) -> None:
        """End the zygote; its children stay. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._ready is not None and not self._ready.done():
            self._ready.get_loop().remove_reader(self._socket)
            self._ready.set_result(False)
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _be_subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class Adopted:
    """A child that another process has forked: what is used of `asyncio.subprocess.Process`.

    Raises:
        OSError: it is not a child of this process (and is ended).
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            self._descriptor = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        """Wait for its end; its return code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode
