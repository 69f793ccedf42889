"""Child processes: started in parallel, logged to files, ended together.

A specification is plain data, so that another runtime (actors on many machines) can run the same one. Nothing here
outlives the driver: see `miles_loop.child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from miles_loop.errors import DiskFullError, ProcessDiedError
from miles_loop.files import is_disk_full
from miles_loop.guard import Guard

if TYPE_CHECKING:
    from miles_loop.zygote import Adopted, Zygote

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
_CHILD = Path(__file__).with_name("child.py")
TAIL_LINES = 15
"""Lines of a dead process's log that its error shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run.

    Attributes:
        name: for messages and the log file.
        module: Python module, run as `__main__`.
        arguments: its command line.
        threads: CPU threads it may use; contended OpenMP threads are orders of magnitude slower than one.
        environment: additions to the parent's environment.
        python: interpreter of another environment, which need not have Miles; None for this one.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None


def child_command(spec: ProcessSpec, guard: str) -> list[str]:
    """Command line of a child that ends with this process; `guard` names descriptors that it inherits (`Guard`)."""
    arguments = [guard, spec.module, *spec.arguments]
    if spec.python is None:
        return [sys.executable, "-m", "miles_loop.child", *arguments]
    # Run by its path, as a program of the standard library alone; its folder does not get onto the module path.
    run = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    return [spec.python, "-c", run, str(_CHILD), *arguments]


@contextlib.contextmanager
def tied(command: Sequence[str]) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """A command line that runs a program, which ends with this process or with the context; and what it inherits.

    It has to be started as the leader of a session.
    """
    read_end, write_end = os.pipe()
    try:
        # Isolated, so that nothing beside the file gets onto the path; the program's environment is what it was.
        yield [sys.executable, "-I", str(_CHILD), str(read_end), "--", *command], (read_end,)
    finally:
        os.close(read_end)
        os.close(write_end)


def child_environment(spec: ProcessSpec) -> dict[str, str]:
    """The parent's environment with explicit thread counts.

    PYTHONDONTWRITEBYTECODE is taken out: without byte code every start compiles torch's imports again, which
    more than doubles the time to the first step.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment.update({name: str(spec.threads) for name in _THREAD_VARIABLES})
    environment.update({"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"})
    environment.update(spec.environment)
    return environment


class Process(Protocol):
    """A process of a run that is supervised, wherever it runs."""

    @property
    def name(self) -> str:
        """Name of its specification."""

    @property
    def log(self) -> Path:
        """File that it writes to."""

    @property
    def running(self) -> bool:
        """True from start until the process has ended."""

    @property
    def url(self) -> str | None:
        """Where it answers since its last start; None for a process whose address never changes."""

    async def start(self) -> None:
        """Start it, again when it has ended."""

    async def displaced(self) -> bool:
        """Whether it ended and somebody else serves where it should: started again, it moves."""

    async def died(self) -> ProcessDiedError:
        """Wait until it ends without having been told to; never returns for a stopped one."""

    def death(self) -> ProcessDiedError:
        """How it ended, with the end of its log."""

    def crash(self, why: str) -> None:
        """Kill it as if it had died by itself: whoever waits for `died` is told, with the run's reason `why`."""

    async def stop(self, timeout_s: float) -> None:
        """End it: ask, wait, then kill."""


class ChildProcess:
    """One running child. `died` ends (with a ProcessDiedError as result) when the process ends by itself.

    Args:
        spec: what to run.
        log: file that its output is appended to.
        inherits: a socket that becomes the child's; it is closed here once the child has it.
        zygote: forks the child where that is possible.
    """

    def __init__(
        self, spec: ProcessSpec, log: Path, inherits: socket.socket | None = None, zygote: Zygote | None = None
    ) -> None:
        self.spec = spec
        self.log = log
        self._inherits = inherits
        self._zygote = zygote
        self._process: asyncio.subprocess.Process | Adopted | None = None
        self._guard: Guard | None = None
        self._starting = asyncio.Lock()
        self._stopping = False
        self._killed_because: str | None = None
        self._log_start = 0

    @property
    def name(self) -> str:
        """Name of its specification."""
        return self.spec.name

    @property
    def url(self) -> str | None:
        """None: nobody calls it (see `miles_loop.serving`)."""
        return None

    async def displaced(self) -> bool:
        """Never: it has no address."""
        return False

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True from start until the process has ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it; the log is appended to (a run that was resumed keeps its old logs)."""
        async with self._starting:
            await self._start()

    async def _start(self) -> None:
        self.close_pipe()  # of an earlier start: what that one left behind ends now
        guard = self._guard = Guard(self.name)
        self._stopping, self._killed_because = False, None
        passed = [*guard.passed, *([] if self._inherits is None else [self._inherits.fileno()])]
        try:
            with self.log.open("ab") as log:
                self._log_start = log.tell()
                forked = await self._zygote.start(self.spec, log.fileno(), passed) if self._zygote else None
                self._process = forked or await asyncio.create_subprocess_exec(
                    *child_command(self.spec, guard.argument),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=child_environment(self.spec),
                    pass_fds=passed,
                    start_new_session=True,  # Ctrl-C reaches the driver alone, which ends the others in order
                )
        except OSError as error:
            if is_disk_full(error):
                raise DiskFullError(self.log) from error
            if self.spec.python is not None and error.filename == self.spec.python:
                how = f"cannot be run: {error.strerror}: {self.spec.python}; name an interpreter in engine.python"
                raise ProcessDiedError(self.name, how, self.log, "") from error
            raise
        finally:
            guard.let_go()
            self._let_go()
        guard.watch(self._process.pid, lambda: self.running and not self._stopping)

    async def died(self) -> ProcessDiedError:
        """Wait until the process ends without having been told to; never returns for a stopped one."""
        assert self._process is not None
        await self._process.wait()
        if self._stopping:
            await asyncio.Event().wait()
        return self.death()

    def death(self) -> ProcessDiedError:
        """How it ended, with the end of its log."""
        assert self._process is not None
        code = self._process.returncode
        how = f"ended with status {code}"
        if code == -signal.SIGKILL and self._killed_because is not None:
            how = f"was killed by the run: {self._killed_because}"
        elif code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory, or somebody killed it)"
        return ProcessDiedError(self.name, how, self.log, self.tail())

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines that it wrote since its start."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - 16384))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    async def stop(self, timeout_s: float) -> None:
        """End it: terminate, wait, then kill its whole process group. A start that is under way is awaited first."""
        self._stopping = True
        async with self._starting:
            await self._stop(timeout_s)

    async def _stop(self, timeout_s: float) -> None:
        if self._process is None:
            self._let_go()
            self.close_pipe()
            return
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        self._signal(signal.SIGKILL)  # whatever is left of the group
        await self._process.wait()
        self.close_pipe()

    def crash(self, why: str) -> None:
        """Kill it as if it had died by itself: whoever waits for `died` is told, with the run's reason `why`."""
        if self.running:
            self._killed_because = why
        self._signal(signal.SIGKILL)

    def _let_go(self) -> None:
        if self._inherits is not None:
            self._inherits.close()

    def close_pipe(self) -> None:
        """Let go of the guard that keeps the child from outliving this process."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
