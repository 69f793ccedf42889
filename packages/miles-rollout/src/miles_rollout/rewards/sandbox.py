"""Runs a foreign Python program with bounded time, memory and output, in namespaces of its own.

What is guaranteed, on Linux:

- *always*: CPU and wall-clock time, address space, size of written files, open files, and captured output are
  bounded; the environment variables of this process are not passed on; no privileges can be gained;
- *network*: a network namespace with nothing in it, so that no address can be reached;
- *processes*: a process namespace, so that nothing the program starts outlives it or can see others;
- *files*: everything but the program's temporary working folder is read-only.

The last three need unprivileged user namespaces. Each is probed in the process itself, and a program does not
start unless all that `require` names are in force. The number of processes is not bounded; all of them end with
the wall-clock time. Files of the machine can be *read*; it is not a jail for
secrets. It is no defence against kernel exploits either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from enum import StrEnum
from pathlib import Path

import msgspec

from miles_contracts import InvalidFieldError, MilesError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_S = 10.0


class Isolation(StrEnum):
    """What a sandboxed program cannot touch."""

    NETWORK = "network"
    PROCESSES = "processes"
    FILES = "files"


class SandboxError(MilesError):
    """The sandbox itself does not work here."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one run.

    Attributes:
        wall_s: seconds from start to end.
        cpu_s: whole seconds of processor time.
        memory_bytes: address space.
        file_bytes: largest file that may be written.
        output_bytes: captured of standard output and of standard error; the rest is dropped.
        open_files: file descriptors.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 16 * 2**20
    output_bytes: int = 2**20
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise InvalidFieldError(f"Limits.{name}", getattr(self, name), "use a value > 0")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. `status` is the exit status (128 + n for signal n), None when the time was up."""

    status: int | None
    out: str
    err: str


class Sandbox:
    """Runs Python programs.

    Args:
        limits: bounds of each run.
        require: what must be isolated for a program to start.
        concurrency: programs at once.
        python: interpreter; its standard library is what programs may import.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        require: frozenset[Isolation] = frozenset(Isolation),
        concurrency: int = 2,
        python: str = sys.executable,
    ) -> None:
        if sys.platform != "linux":
            raise InvalidFieldError("sandbox", sys.platform, "the sandbox needs Linux")
        if concurrency < 1:
            raise InvalidFieldError("concurrency", concurrency, "use a value >= 1")
        self._limits = limits or Limits()
        self._require = frozenset(Isolation(r) for r in require)
        self._slots = asyncio.Semaphore(concurrency)
        self._python = python

    async def run(self, code: str, *, stdin: str = "") -> Run:
        """Run `code` as a program in an empty temporary folder.

        Raises:
            SandboxError: something in `require` cannot be isolated on this machine, or the sandbox is broken.
        """
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="miles-sandbox-", ignore_cleanup_errors=True) as folder:
                program = _write_program(folder, code)
                return await self._run(folder, [self._python, "-I", "-S", "-B", program], stdin)

    async def _run(self, folder: str, program: list[str], stdin: str) -> Run:
        reading, writing = os.pipe()
        limits = msgspec.to_builtins(self._limits) | {"report_fd": writing, "require": sorted(self._require)}
        try:
            process = await asyncio.create_subprocess_exec(
                self._python,
                "-I",
                "-S",
                str(_CHILD),
                msgspec.json.encode(limits).decode(),
                "--",
                *program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                pass_fds=(writing,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            await self._check(reading)
            return await self._watch(process, stdin)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _check(self, reading: int) -> None:
        """Read what the child could not isolate, and refuse to go on without what is required."""
        try:
            async with asyncio.timeout(_START_S):
                raw = await asyncio.get_running_loop().run_in_executor(None, os.read, reading, 65536)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not start within {_START_S:g} s") from error
        finally:
            os.close(reading)
        if not raw:
            raise SandboxError("the sandbox ended before it began")
        failed = msgspec.json.decode(raw, type=dict[str, str | None])
        missing = [f"{name} ({failed[name]})" for name in sorted(self._require) if failed.get(name) is not None]
        if missing:
            raise SandboxError(
                f"cannot isolate {', '.join(missing)}; allow unprivileged user namespaces, or leave it out of `require`"
            )

    async def _watch(self, process: asyncio.subprocess.Process, stdin: str) -> Run:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        readers = asyncio.gather(
            _read_some(process.stdout, self._limits.output_bytes),
            _read_some(process.stderr, self._limits.output_bytes),
            _feed(process.stdin, stdin.encode()),
            process.wait(),
        )
        try:
            async with asyncio.timeout(self._limits.wall_s):
                out, err, _, status = await readers
        except TimeoutError:
            return Run(status=None, out="", err=f"no end within {self._limits.wall_s:g} s")
        return Run(status=status, out=out.decode(errors="replace"), err=err.decode(errors="replace"))


def _write_program(folder: str, code: str) -> str:
    path = Path(folder, "program.py")
    path.write_text(code, encoding="utf-8", errors="replace")
    return str(path)


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read its input
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _read_some(pipe: asyncio.StreamReader, limit: int) -> bytes:
    """The first `limit` bytes; the rest is read and dropped, so that the writer is not blocked."""
    kept = bytearray()
    while chunk := await pipe.read(65536):
        kept += chunk[: limit - len(kept)]
    return bytes(kept)
