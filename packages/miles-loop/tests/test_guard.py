"""A guard that is killed is noticed and replaced, so that a child still ends with its driver, however that ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from loop_toy.harness import alive, children, wait_for

from miles_loop import guard as guarding
from miles_loop.processes import ChildProcess, ProcessSpec

SLEEP = "import time\nprint('hello', flush=True)\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def guards(pid: int) -> list[int]:
    """Guards among the children of a process."""
    return [child for child in children(pid) if b"miles-guard" in _command_line(child)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def first_guard(pid: int) -> int:
    """The guard that a child came with; it may become one only after the child has begun to run."""
    wait_for(lambda: guards(pid), 60)
    (found,) = guards(pid)
    return found


async def started(log: Path) -> ChildProcess:
    process = ChildProcess(ProcessSpec(name="sleeps", module="sleeps"), log)
    await process.start()
    while "hello" not in process.tail():
        assert process.running, process.tail()
        await asyncio.sleep(0.01)
    return process


async def eventually(condition: Callable[[], object]) -> None:
    """Wait while the event loop goes on."""
    await asyncio.to_thread(wait_for, condition, 60)


async def test_a_guard_that_is_killed_is_replaced_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = await started(tmp_path / "log")
    guard = first_guard(process.pid)
    with caplog.at_level(logging.WARNING):
        os.kill(guard, signal.SIGKILL)
        await eventually(lambda: guards(os.getpid()))
    assert process.running, "the child has nothing to do with it"
    assert [r.getMessage() for r in caplog.records if "guard" in r.getMessage()] == [
        "somebody killed the guard of process sleeps; it has another one"
    ]
    (substitute,) = guards(os.getpid())
    pid = process.pid
    await process.stop(5)
    assert not alive(pid)
    assert not alive(substitute)


async def test_the_substitute_ends_with_the_child_and_does_nothing_to_others(tmp_path: Path) -> None:
    process = await started(tmp_path / "log")
    os.kill(first_guard(process.pid), signal.SIGKILL)
    await eventually(lambda: guards(os.getpid()))
    (substitute,) = guards(os.getpid())
    os.kill(process.pid, signal.SIGKILL)
    assert "SIGKILL" in (await process.died()).how
    await process.start()
    assert not alive(substitute)
    assert guards(os.getpid()) == []
    await process.stop(5)


@pytest.mark.parametrize("end", ["stop", "crash", "killed"])
async def test_a_guard_that_ends_with_its_child_is_not_missed(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guarding, "_SETTLES_S", 0.05)
    process = await started(tmp_path / "log")
    first_guard(process.pid)
    with caplog.at_level(logging.WARNING):
        if end == "stop":
            await process.stop(5)
        elif end == "crash":
            process.crash("on purpose")
            await process.died()
        else:
            os.killpg(process.pid, signal.SIGKILL)
            await process.died()
        await asyncio.sleep(0.2)
    assert guards(os.getpid()) == []
    assert not caplog.records
    process.close_pipe()


async def test_without_a_shell_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = await started(tmp_path / "log")
    monkeypatch.setattr(guarding, "_SHELL", "/no/such/shell")
    os.kill(first_guard(process.pid), signal.SIGKILL)
    await eventually(lambda: any("gets no other one" in r.getMessage() for r in caplog.records))
    assert process.running
    await process.stop(5)


def test_a_child_whose_guard_was_killed_still_ends_with_its_driver(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from miles_loop.processes import ChildProcess, ProcessSpec

async def main():
    process = ChildProcess(ProcessSpec(name="c", module="sleeps"), Path({str(tmp_path / "log")!r}))
    await process.start()
    while "hello" not in process.tail():
        await asyncio.sleep(0.01)
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    os.kill(first_guard(child), signal.SIGKILL)
    wait_for(lambda: guards(driver.pid), 60)
    (substitute,) = guards(driver.pid)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not alive(child) and not alive(substitute), 60)
