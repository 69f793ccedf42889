"""A child that the zygote forks is what one that is started is: its own group, guarded, supervised, logged."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loop_toy.harness import alive, children, named_child, wait_for

from miles_loop import zygote as module
from miles_loop.processes import ChildProcess, ProcessSpec
from miles_loop.zygote import Adopted, Zygote, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="no forks here: not Linux, or an accelerator")

SAYS = """
import os, sys, time
print(sys.argv[1:], "colorsys" in sys.modules, __name__, os.getpgid(0) == os.getsid(0) == os.getpid(), flush=True)
print(os.getppid(), os.environ.get("OMP_NUM_THREADS"), os.environ.get("HF_HUB_OFFLINE"), flush=True)
print("to stderr", file=sys.stderr, flush=True)
"""
MODULES = ("says", "sleeps", "fails", "raises", "listens", "miles_rollout.engine")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that children can run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "says.py").write_text(SAYS)
    (folder / "sleeps.py").write_text("import time\nprint('hello', flush=True)\ntime.sleep(60)\n")
    (folder / "fails.py").write_text("raise SystemExit('no good')\n")
    (folder / "raises.py").write_text("raise ValueError('broken')\n")
    (folder / "listens.py").write_text(
        "import socket, sys\nprint(socket.socket(fileno=int(sys.argv[1])).recv(5).decode(), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
async def zygote(modules: None) -> AsyncIterator[Zygote]:
    """One that imports next to nothing."""
    made = Zygote(modules=MODULES, imports=("colorsys",))
    yield made
    made.close()


def forked(zygote: Zygote, name: str, log: Path, *arguments: str, **changes: object) -> ChildProcess:
    spec = ProcessSpec(name=name, module=name, arguments=arguments, **changes)  # type: ignore[arg-type]
    return ChildProcess(spec, log, zygote=zygote)


async def test_it_runs_as_a_new_interpreter_would(zygote: Zygote, tmp_path: Path) -> None:
    process = forked(zygote, "says", tmp_path / "log", "--a", "b")
    await process.start()
    assert isinstance(process._process, Adopted)
    assert await process._process.wait() == 0
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["['--a', 'b'] True __main__ True", f"{os.getpid()} 1 None", "to stderr"]
    assert not process.running
    assert process.death().how == "ended with status 0"


async def test_it_is_supervised_and_stopped_as_any_child(zygote: Zygote, tmp_path: Path) -> None:
    process = forked(zygote, "sleeps", tmp_path / "log")
    await process.start()
    while "hello" not in process.tail():
        assert process.running
    assert named_child(os.getpid(), "miles_loop.child") == process.pid
    os.kill(process.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in (await process.died()).how
    await process.start()  # the log is appended to
    guards = children(process.pid)
    await process.stop(10)
    assert not alive(process.pid)
    wait_for(lambda: not any(map(alive, guards)))


@pytest.mark.parametrize(("name", "said"), [("fails", "no good"), ("raises", "ValueError: broken")])
async def test_how_it_fails_is_in_its_log(zygote: Zygote, tmp_path: Path, name: str, said: str) -> None:
    process = forked(zygote, name, tmp_path / "log")
    await process.start()
    error = await process.died()
    assert error.how == "ended with status 1"
    assert process.tail().endswith(said)


async def test_it_inherits_its_socket_under_the_number_that_it_is_told(zygote: Zygote, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    spec = ProcessSpec(name="listens", module="listens", arguments=(str(theirs.fileno()),))
    process = ChildProcess(spec, tmp_path / "log", inherits=theirs, zygote=zygote)
    await process.start()
    with ours:
        ours.sendall(b"hello")
        assert (await process.died()).how == "ended with status 0"
    assert process.tail() == "hello"


async def test_it_is_guarded_where_its_driver_has_hundreds_of_files_open(zygote: Zygote, tmp_path: Path) -> None:
    opened = []
    while not opened or opened[-1] < 500:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    process = forked(zygote, "sleeps", tmp_path / "log")
    try:
        await process.start()
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert isinstance(process._process, Adopted)
    while "hello" not in process.tail():
        assert process.running
    (guard,) = children(process.pid)
    process.close_pipe()  # as the end of the driver would
    wait_for(lambda: not alive(guard))
    assert "killed by SIGKILL" in (await process.died()).how


async def test_one_that_gives_no_answer_is_given_up(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer may yet come, and would be taken for the one to the next request."""
    first = forked(zygote, "says", tmp_path / "first")
    await first.start()
    monkeypatch.setattr(module, "_FORK_S", 0.05)
    os.kill(zygote._process.pid, signal.SIGSTOP)
    second = forked(zygote, "says", tmp_path / "second")
    await second.start()
    assert not isinstance(second._process, Adopted)
    assert "process says is started without the zygote: timed out" in caplog.text
    assert not alive(zygote._process.pid)
    for process in (first, second):
        assert (await process.died()).how == "ended with status 0"
        assert len(process.log.read_text().splitlines()) == 3
        await process.stop(5)


def test_it_does_not_outlive_its_driver(tmp_path: Path) -> None:
    driver = f"""
import asyncio
from pathlib import Path
from miles_loop.processes import ChildProcess, ProcessSpec
from miles_loop.zygote import Zygote

async def main():
    zygote = Zygote(modules=("sleeps",), imports=())
    process = ChildProcess(ProcessSpec(name="c", module="sleeps"), Path({str(tmp_path / "log")!r}), zygote=zygote)
    await process.start()
    print(process.pid, zygote._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        process.kill()
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    "change", [{"threads": 2}, {"environment": {"A": "b"}}, {"python": sys.executable}], ids=lambda c: next(iter(c))
)
async def test_what_is_not_alike_is_started(zygote: Zygote, tmp_path: Path, change: dict[str, object]) -> None:
    process = forked(zygote, "sleeps", tmp_path / "log", **change)
    await process.start()
    assert not isinstance(process._process, Adopted)
    await process.stop(10)


async def test_other_modules_are_started(zygote: Zygote, tmp_path: Path) -> None:
    spec = ProcessSpec(name="timeit", module="timeit", arguments=("--help",))
    process = ChildProcess(spec, tmp_path / "log", zygote=zygote)
    await process.start()
    assert not isinstance(process._process, Adopted)
    assert (await process.died()).how == "ended with status 0"


async def test_without_its_imports_children_are_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zygote = Zygote(modules=MODULES, imports=("there_is_no_such_module",))
    process = forked(zygote, "says", tmp_path / "log")
    await process.start()
    assert (await process.died()).how == "ended with status 0"
    assert "False __main__ True" in process.tail()
    assert "process says is started without the zygote: it ended before it was ready" in caplog.text
    zygote.close()


async def test_one_that_starts_threads_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "modules" / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    zygote = Zygote(modules=MODULES, imports=("threads",))
    process = forked(zygote, "says", tmp_path / "log")
    await process.start()
    assert not isinstance(process._process, Adopted)
    await process.stop(10)
    zygote.close()


async def test_closing_releases_who_waits_and_later_children_are_started(tmp_path: Path) -> None:
    zygote = Zygote(modules=MODULES, imports=("asyncio",))
    process = forked(zygote, "says", tmp_path / "log")
    starting = asyncio.create_task(process.start())
    await asyncio.sleep(0)
    zygote.close()
    zygote.close()
    await starting
    assert not isinstance(process._process, Adopted)
    again = forked(zygote, "says", tmp_path / "log")
    await again.start()
    assert not isinstance(again._process, Adopted)
    for one in (process, again):
        await one.stop(10)


async def test_one_that_is_stopped_while_it_starts_does_not_run_on(tmp_path: Path) -> None:
    """As when the start of another process fails while this one still waits for the zygote."""
    zygote = Zygote(modules=MODULES, imports=("asyncio",))
    process = forked(zygote, "sleeps", tmp_path / "log")
    starting = asyncio.create_task(process.start())
    await asyncio.sleep(0)
    await process.stop(5)
    await starting
    assert not process.running
    assert not alive(process.pid)
    zygote.close()


def test_a_stranger_is_not_adopted() -> None:
    with subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '60'])"]) as parent:
        wait_for(lambda: children(parent.pid))
        stranger = children(parent.pid)[0]
        with pytest.raises(ChildProcessError):
            Adopted(stranger)
        wait_for(lambda: not alive(stranger))


async def test_what_it_imports_leaves_it_fit_to_fork_an_engine(tmp_path: Path) -> None:
    zygote = Zygote()
    process = forked(zygote, "miles_rollout.engine", tmp_path / "log", "--help")
    await process.start()
    assert isinstance(process._process, Adopted), "see the log of the driver"
    assert (await process.died()).how == "ended with status 0"
    assert "usage: miles-engine" in (tmp_path / "log").read_text()
    zygote.close()


def test_a_machine_with_an_accelerator_starts_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCELERATORS", (str(tmp_path),))
    assert not can_fork()
