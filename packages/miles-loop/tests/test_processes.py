"""Children are started with explicit threads, end when they are told to, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from loop_toy.harness import alive, wait_for

from miles_loop.errors import DiskFullError, ProcessDiedError
from miles_loop.processes import ChildProcess, ProcessSpec, child_environment, tied
from miles_rollout.evaluation import EvaluationSkippedError, ExternalEvaluator

SLEEP = "import time\nprint('hello', flush=True)\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that children can run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "sleeps.py").write_text(SLEEP)
    (folder / "fails.py").write_text("raise SystemExit('no good')\n")
    (folder / "stubborn.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    parent = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-m', 'stubborn'])\n"
    (folder / "parent.py").write_text(parent + "print(child.pid, flush=True)\nchild.wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def spec(module: str) -> ProcessSpec:
    """One thread, no arguments."""
    return ProcessSpec(name=module, module=module)


async def started(module: str, log: Path, says: str = "") -> ChildProcess:
    """A child that has written something."""
    process = ChildProcess(spec(module), log)
    await process.start()
    while says not in process.tail() or (says and not process.tail()):
        assert process.running, process.tail()
        await asyncio.sleep(0.01)
    return process


def test_threads_are_explicit_and_byte_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = child_environment(ProcessSpec(name="x", module="x", threads=3, environment={"A": "b"}))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["A"] == "b"


async def test_a_child_may_run_in_an_environment_without_miles(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    python = tmp_path / "other" / "bin" / "python"
    (tmp_path / "modules" / "asks.py").write_text(
        "import importlib.util, sys\n"
        "print(sys.prefix, sys.argv[1:], importlib.util.find_spec('miles_loop'), 'toml' in sys.modules, flush=True)\n"
        "import time\ntime.sleep(60)\n"
    )
    spec = ProcessSpec(name="asks", module="asks", arguments=("--a", "b"), python=str(python))
    process = ChildProcess(spec, tmp_path / "log")
    await process.start()
    while "False" not in process.tail():
        assert process.running, process.tail()
        await asyncio.sleep(0.01)
    assert process.tail() == f"{tmp_path / 'other'} ['--a', 'b'] None False"
    pid = process.pid
    await process.stop(5)
    assert not alive(pid)


async def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    process = ChildProcess(ProcessSpec(name="x", module="x", python=str(tmp_path / "nowhere")), tmp_path / "log")
    with pytest.raises(ProcessDiedError, match=r"cannot be run.*nowhere; name an interpreter in engine\.python"):
        await process.start()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
async def test_a_child_that_could_not_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    process = ChildProcess(spec("sleeps"), tmp_path / "no folder" / "log")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await process.start()
    await process.stop(5)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_stopped_child_has_not_died(tmp_path: Path) -> None:
    process = await started("sleeps", tmp_path / "log", "hello")
    died = asyncio.create_task(process.died())
    await process.stop(5)
    await asyncio.sleep(0.05)
    assert not process.running
    assert not died.done()
    died.cancel()


async def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    process = await started("stubborn", tmp_path / "log", "hello")
    await process.stop(0.1)
    assert not alive(process.pid)


async def test_the_whole_group_ends(tmp_path: Path) -> None:
    process = await started("parent", tmp_path / "log", "hello")
    grandchild = int(process.tail().split()[0])
    await process.stop(0.1)
    wait_for(lambda: not alive(grandchild), 5)


async def test_a_death_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier start\n")
    process = ChildProcess(spec("fails"), tmp_path / "log")
    await process.start()
    death = await process.died()
    assert death.reason == "process_died"
    assert "process fails ended with status 1" in str(death)
    assert "| no good" in str(death)
    assert "earlier" not in str(death)
    process.close_pipe()


async def test_a_killed_child_says_so(tmp_path: Path) -> None:
    process = await started("sleeps", tmp_path / "log", "hello")
    os.kill(process.pid, signal.SIGKILL)
    assert "was killed by SIGKILL (out of memory" in (await process.died()).how
    process.close_pipe()


async def test_a_crash_counts_as_a_death(tmp_path: Path) -> None:
    process = await started("sleeps", tmp_path / "log", "hello")
    process.crash("on purpose")
    death = await process.died()
    assert (death.name, death.how) == ("sleeps", "was killed by the run: on purpose")
    await process.start()
    os.kill(process.pid, signal.SIGKILL)
    assert "somebody killed it" in (await process.died()).how
    process.close_pipe()


async def test_a_child_can_be_started_again(tmp_path: Path) -> None:
    process = await started("sleeps", tmp_path / "log", "hello")
    first = process.pid
    process.crash("on purpose")
    await process.died()
    await process.start()
    assert process.running
    assert process.pid != first
    await process.stop(5)


async def test_no_room_for_the_log(tmp_path: Path) -> None:
    process = ChildProcess(spec("sleeps"), Path("/dev/full/log"))
    with pytest.raises(NotADirectoryError):
        await process.start()
    full = ChildProcess(spec("sleeps"), tmp_path / "log")

    class Full:
        """A log that cannot be opened."""

        def open(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

    full.log = Full()  # type: ignore[assignment]
    with pytest.raises(DiskFullError):
        await full.start()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_parent_however_it_ends(tmp_path: Path, how: signal.Signals) -> None:
    code = f"""
import asyncio
from pathlib import Path
from miles_loop.processes import ChildProcess, ProcessSpec

async def main():
    process = ChildProcess(ProcessSpec(name="c", module="parent"), Path({str(tmp_path / "log")!r}))
    await process.start()
    while "hello" not in process.tail():
        await asyncio.sleep(0.01)
    print(process.pid, process.tail().split()[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.send_signal(how)
    driver.communicate()
    wait_for(lambda: not any(alive(pid) for pid in pids), 10)


EVALUATION = """
import asyncio, sys
from pathlib import Path
from miles_loop.processes import tied
from miles_rollout.evaluation import ExternalEvaluator

asyncio.run(ExternalEvaluator(["bash", "-c", sys.argv[1], "{checkpoint}"], tie=tied)(3, Path(sys.argv[2])))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_evaluation_program_ends_with_the_driver_however_that_ends(tmp_path: Path, how: signal.Signals) -> None:
    """And what it has started; it ignores every request to end."""
    pids = tmp_path / "pids"
    script = f"trap '' TERM HUP INT; sleep 1000 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; wait; sleep 1000"
    driver = subprocess.Popen([sys.executable, "-c", EVALUATION, script, str(tmp_path)])
    wait_for(pids.exists, 60)
    found = [int(word) for word in pids.read_text().split()]
    assert len(found) == 2
    assert all(alive(pid) for pid in found)
    driver.send_signal(how)
    driver.communicate()
    wait_for(lambda: not any(alive(pid) for pid in found), 60)


async def test_a_tied_program_is_the_same_program(tmp_path: Path) -> None:
    """Its arguments, environment, folder, exit status and output are what they would be."""
    code = "import json, os, sys; print(json.dumps({'n': len(sys.argv), 'x': int(os.environ['X'])})); sys.exit(0)"
    evaluator = ExternalEvaluator(
        [sys.executable, "-c", code, "{checkpoint}", "--", ""], environment={"X": "7"}, tie=tied
    )
    assert await evaluator(1, tmp_path) == {"eval/n": 4.0, "eval/x": 7.0}
    with pytest.raises(EvaluationSkippedError, match="sh ended with status 5: went wrong"):
        await ExternalEvaluator(["sh", "-c", "echo went wrong >&2; exit 5", "{checkpoint}"], tie=tied)(1, tmp_path)
    with pytest.raises(EvaluationSkippedError, match="/no/such cannot be started: No such file or directory"):
        await ExternalEvaluator(["/no/such", "{checkpoint}"], tie=tied)(1, tmp_path)


async def test_a_tied_program_ends_when_its_evaluation_is_given_up(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    evaluator = ExternalEvaluator(["sh", "-c", f"echo $$ > {pids}; sleep 1000", "{checkpoint}"], tie=tied)
    running = asyncio.create_task(evaluator(1, tmp_path))
    await asyncio.to_thread(wait_for, lambda: pids.exists() and pids.read_text(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    wait_for(lambda: not alive(int(pids.read_text())), 60)
