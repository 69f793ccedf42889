"""A judged program is bounded in everything and reaches nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from miles_contracts import InvalidFieldError, Message, Task
from miles_rollout.rewards import CodeReward, Isolation, Limits, Sandbox, SandboxError, score
from miles_rollout.rewards import sandbox as module
from miles_rollout.rewards.code import extract_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def isolated() -> frozenset[Isolation]:
    """What this machine can isolate; tests of what it cannot are skipped."""
    found = set()
    for one in Isolation:
        try:
            asyncio.run(Sandbox(require=frozenset({one}), limits=Limits(wall_s=60)).run("pass"))
        except SandboxError:
            continue
        found.add(one)
    return frozenset(found)


def sandbox(isolated: frozenset[Isolation], **limits) -> Sandbox:
    return Sandbox(require=isolated, limits=Limits(**({"wall_s": 60.0} | limits)))


async def test_input_output_and_status(isolated) -> None:
    run = await sandbox(isolated).run("import sys; print(input()[::-1]); sys.exit(7)", stdin="abc\n")
    assert (run.status, run.out) == (7, "cba\n")
    run = await sandbox(isolated).run("raise ValueError('no')")
    assert run.status == 1
    assert run.err.endswith("ValueError: no\n")


async def test_time_is_bounded(isolated) -> None:
    assert (await sandbox(isolated, wall_s=1.0).run("import time; time.sleep(600)")).status is None
    assert (await sandbox(isolated, cpu_s=1).run("while True: pass")).status == 128 + 24  # SIGXCPU


async def test_memory_files_and_output_are_bounded(isolated) -> None:
    run = await sandbox(isolated, memory_bytes=256 * 2**20).run("bytearray(2**30)")
    assert "MemoryError" in run.err
    run = await sandbox(isolated, file_bytes=1000).run(
        "open('f', 'wb', 0).write(b'x' * 5000); open('f', 'ab', 0).write(b'x')"
    )
    assert run.status != 0
    run = await sandbox(isolated, output_bytes=1000).run("print('x' * 10**7)")
    assert (run.status, len(run.out)) == (0, 1000)


async def test_secrets_in_the_environment_stay_outside(isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_FOR_TEST", "hunter2")
    run = await sandbox(isolated).run("import os; print(dict(os.environ))")
    assert "hunter2" not in run.out
    assert run.status == 0


async def test_no_network(isolated) -> None:
    if Isolation.NETWORK not in isolated:
        pytest.skip("no network namespaces here")
    code = "import socket\nsocket.create_connection(('127.0.0.1', 1), 5)"
    assert "Network is unreachable" in (await sandbox(isolated).run(code)).err


async def test_nothing_is_left_running(isolated, tmp_path: Path) -> None:
    if Isolation.PROCESSES not in isolated:
        pytest.skip("no process namespaces here")
    mark = f"orphan-of-{tmp_path.name}"
    code = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}])
time.sleep(0.2)
"""
    assert (await sandbox(isolated).run(code)).status == 0
    assert not _is_running(mark)


def _is_running(mark: str) -> bool:
    found = False
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found |= mark.encode() in path.read_bytes()
    return found


async def test_only_its_own_folder_can_be_written(isolated, tmp_path: Path) -> None:
    if Isolation.FILES not in isolated:
        pytest.skip("no read-only mounts here")
    target = tmp_path / "escaped"
    run = await sandbox(isolated).run(f"open('own', 'w').write('x'); open({str(target)!r}, 'w')")
    assert "Read-only file system" in run.err
    assert not target.exists()


async def test_what_is_required_and_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHILD", _without_namespaces(tmp_path))
    with pytest.raises(SandboxError, match="cannot isolate files .*network.*processes.*leave it out of `require`"):
        await sandbox(frozenset(Isolation)).run("print(1)")
    assert (await sandbox(frozenset()).run("print(1)")).out == "1\n"


def _without_namespaces(folder: Path) -> Path:
    """The child, on a kernel that refuses unshare."""
    child = module._CHILD.read_text()
    assert "_call(_libc.unshare(" in child
    (folder / "child.py").write_text(child.replace("_call(_libc.unshare(", "_call(1 or ("))
    return folder / "child.py"


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_bytes", "output_bytes"])
def test_bad_limits_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match=name):
        Limits(**{name: 0})


def code_task(tests: object) -> Task:
    return Task(prompt_index=0, messages=(Message(role="user", content="q"),), metadata={"tests": tests})


ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


async def test_code_reward_with_statements(isolated) -> None:
    reward = CodeReward(sandbox(isolated))
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
    assert (await score(reward, code_task(tests), ADD)).value == 1.0
    assert (await score(reward, code_task([*tests, "assert add(1, 1) == 3"]), ADD)).value == 0.0
    partial = CodeReward(sandbox(isolated), partial=True)
    assert (await score(partial, code_task([*tests, "assert add(1, 1) == 3"]), ADD)).value == pytest.approx(2 / 3)


async def test_code_reward_with_input_and_output(isolated) -> None:
    reward = CodeReward(sandbox(isolated))
    tests = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}]
    good = "```\nprint(sum(map(int, input().split())))\n```"
    assert (await score(reward, code_task(tests), good)).value == 1.0
    assert (await score(reward, code_task(tests), "```\nprint(5)\n```")).value == 0.0


@pytest.mark.parametrize("cheat", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
async def test_leaving_before_the_test_is_no_pass(isolated, cheat: str) -> None:
    reward = CodeReward(sandbox(isolated))
    assert (await score(reward, code_task(["assert add(1, 2) == 3"]), cheat)).value == 0.0


@pytest.mark.parametrize("tests", [None, [], "assert x", [{"input": "1"}], [3]])
async def test_tasks_without_tests_are_failures(isolated, tests: object) -> None:
    outcome = await score(CodeReward(sandbox(isolated)), code_task(tests), ADD)
    assert "task.metadata.tests" in (outcome.error or "")


def test_the_last_block_is_the_answer() -> None:
    assert extract_code("```py\na\n```\n```python\nb\n```") == "b\n"
    assert extract_code("plain") == "plain"
