"""Evaluations are exact, bounded, cleaned up after, and a failed one costs a point and nothing else."""

# ruff: noqa: ASYNC240 - small files in a temporary folder

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factories import BytesRenderer, CountingTasks, MemoryEngine, trajectory

from miles_contracts import EngineUnavailableError, InvalidFieldError, SamplingParams, Status, Task
from miles_rollout.buffer import GroupBuffer
from miles_rollout.evaluation import (
    DedicatedEvaluator,
    EvalPoint,
    EvaluationSkippedError,
    ExternalEvaluator,
    HeldOut,
    Overflow,
    SharedEvaluation,
    SnapshotEvaluation,
    evaluate,
    mean_at_k,
    pass_at_k,
)
from miles_rollout.generate import single_turn
from miles_rollout.router import Router
from miles_rollout.scheduler import Scheduler
from miles_rollout.worker import RolloutWorker

# -- estimators -------------------------------------------------------------------------------------------


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_average_over_all_draws(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    solved = [True] * correct + [False] * (samples - correct)
    draws = list(itertools.combinations(solved, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_known_values() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(200, 13, 100) == pytest.approx(1 - math.comb(187, 100) / math.comb(200, 100))
    assert mean_at_k([1.0, 0.0, 1.0, 0.5], 2) == 0.5


@pytest.mark.parametrize("case", [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_impossible_cases_are_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidFieldError):
        pass_at_k(*case)
    with pytest.raises(InvalidFieldError):
        mean_at_k([1.0, 2.0], 3)


# -- held-out tasks ---------------------------------------------------------------------------------------


async def scripted(task: Task, member: int, attempt: int):
    """Rewards by prompt: 0 always solved, 1 solved by its first member, 2 fails for its first member."""
    if task.prompt_index == 2 and member == 0:
        raise RuntimeError("sandbox gone")
    solved = task.prompt_index == 0 or (task.prompt_index == 1 and member == 0)
    status = Status.TRUNCATED if task.prompt_index == 1 else Status.FINISHED
    return [trajectory(task.prompt_index, member, versions=[5, 5], reward=float(solved), status=status)]


async def test_figures_of_a_family() -> None:
    held_out = HeldOut(name="toy", source=CountingTasks(), generate=scripted, prompts=3, samples=4, ks=(1, 4))
    metrics = await evaluate([held_out])
    expected = {
        "prompts": 3,
        "reward": 5 / 11,
        "failed_ratio": 1 / 12,
        "truncated_ratio": 4 / 12,
        "response_length_mean": 22 / 12,
        "pass@1": (1 + 0.25 + 0) / 3,
        "mean@1": (1 + 1 + 0) / 3,
        "pass@4": 1.0,  # over the two prompts with four scored answers
        "mean@4": (1 + 0.25) / 2,
        "weight_version/mean": 5,
        "weight_version/mixed_version_ratio": 0,
    }
    assert metrics == {f"eval/toy/{k}": pytest.approx(v) for k, v in expected.items()}


async def test_answers_in_flight_are_bounded_and_slow_ones_end() -> None:
    running, most = 0, 0

    async def slow(task: Task, member: int, attempt: int):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(600 if task.prompt_index == 1 else 0)
        finally:
            running -= 1
        return [trajectory(task.prompt_index, member, reward=1.0)]

    held_out = HeldOut(name="slow", source=CountingTasks(), generate=slow, prompts=8)
    metrics = await evaluate([held_out], concurrency=3, episode_timeout_s=0.5)
    assert most == 3
    assert metrics["eval/slow/failed_ratio"] == 1 / 8
    assert metrics["eval/slow/reward"] == 1.0


async def test_unknown_and_mixed_versions_show() -> None:
    async def generate(task: Task, member: int, attempt: int):
        return [trajectory(task.prompt_index, member, versions=[4, 5] if task.prompt_index else [4, 4])]

    metrics = await evaluate([HeldOut(name="t", source=CountingTasks(), generate=generate, prompts=2)])
    assert metrics["eval/t/weight_version/mixed_version_ratio"] == 0.5

    async def silent(task: Task, member: int, attempt: int):
        return [trajectory(task.prompt_index, member, versions=[None])]

    metrics = await evaluate([HeldOut(name="t", source=CountingTasks(), generate=silent, prompts=2)])
    assert "eval/t/weight_version/mean" not in metrics


@pytest.mark.parametrize(
    "bad", [{"name": ""}, {"name": "a/b"}, {"samples": 0}, {"prompts": 0}, {"prompts": 10**9}, {"ks": (2,)}]
)
def test_bad_families_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidFieldError, match=next(iter(bad))):
        HeldOut(**({"name": "a", "source": CountingTasks(), "generate": scripted} | bad))


async def test_names_are_unique() -> None:
    one = HeldOut(name="a", source=CountingTasks(), generate=scripted, prompts=1)
    with pytest.raises(InvalidFieldError, match="unique"):
        await evaluate([one, one])


# -- shared engines ---------------------------------------------------------------------------------------


def training_worker(engine: MemoryEngine, router: Router) -> RolloutWorker:
    generate = single_turn(
        renderer=BytesRenderer(),
        router=router,
        reward=lambda task, text: 1.0,
        sampling=SamplingParams(max_new_tokens=4),
        run_seed=0,
    )
    return RolloutWorker(
        source=CountingTasks(),
        generate=generate,
        buffer=GroupBuffer(max_groups=100),
        scheduler=Scheduler(batch_groups=2, group_size=2, depth=20, max_trajectories=4),
    )


async def test_shared_engines_serve_nobody_else_meanwhile_and_keep_what_was_in_flight() -> None:
    engine = MemoryEngine("http://e", delay=0.01)
    router = Router([engine])
    worker = training_worker(engine, router)
    await worker.start(0)
    await asyncio.sleep(0.005)
    others: list[int] = []

    async def generate(task: Task, member: int, attempt: int):
        others.append(engine.running)
        return [trajectory(task.prompt_index, member, reward=1.0, versions=[0])]

    held_out = HeldOut(name="t", source=CountingTasks(), generate=generate, prompts=5)
    point = await SharedEvaluation(worker=worker, tasks=[held_out]).run(0)
    assert others == [0] * 5
    assert point.skipped is None
    assert point.metrics["eval/t/reward"] == 1.0
    assert point.metrics["eval/version"] == point.metrics["eval/lag_steps"] == 0
    before = worker.metrics()
    assert before["rollout/fully_async/queue_size"] > 0, "what was in flight was kept"
    assert before["rollout/fully_async/wasted_tokens"] == 0
    await worker.collect(2, train_version=0)  # new work started again
    await worker.close()


async def test_a_shared_evaluation_that_cannot_be_is_skipped_and_training_goes_on() -> None:
    engine = MemoryEngine("http://e", delay=600)
    router = Router([engine])
    worker = training_worker(engine, router)
    await worker.start(0)
    await asyncio.sleep(0)
    held_out = HeldOut(name="t", source=CountingTasks(), generate=scripted, prompts=1)
    point = await SharedEvaluation(worker=worker, tasks=[held_out], drain_s=0.02).run(0)
    assert point.metrics == {"eval/skipped_busy": 1.0}
    assert "4 trajectories in flight" in (point.skipped or "")
    assert worker._holds == set()
    await worker.close()

    async def fail(task: Task, member: int, attempt: int):
        raise EngineUnavailableError("http://e", "gone")

    failing = HeldOut(name="t", source=CountingTasks(), generate=fail, prompts=1)
    point = await SharedEvaluation(worker=None, tasks=[failing]).run(3)
    assert point.metrics == {"eval/skipped_failed": 1.0}

    class Broken(CountingTasks):
        def at(self, prompt_index: int) -> Task:
            raise OSError("file vanished")

    broken = HeldOut(name="t", source=Broken(), generate=scripted, prompts=1)
    point = await SharedEvaluation(worker=None, tasks=[broken]).run(3)
    assert point.skipped == "crashed: OSError: file vanished"


# -- snapshots --------------------------------------------------------------------------------------------


class Snapshots:
    """An export and an evaluator that can be held back."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.measured: list[tuple[int, list[str]]] = []
        self.version = 0

    async def export(self, folder: Path) -> None:
        assert folder.name.endswith(".partial"), "a snapshot has its name only when it is whole"
        folder.mkdir()
        (folder / "model.txt").write_text(str(self.version))

    async def __call__(self, version: int, checkpoint: Path | None) -> Mapping[str, float]:
        await self.go.wait()
        assert checkpoint is not None
        self.measured.append((version, [p.read_text() for p in checkpoint.iterdir()]))
        return {"eval/t/reward": 0.5}


def folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


async def test_a_snapshot_is_measured_while_training_goes_on(tmp_path: Path) -> None:
    snapshots = Snapshots()
    queue = SnapshotEvaluation(evaluator=snapshots, export=snapshots.export, directory=tmp_path)
    for version in (2, 4):
        snapshots.version = version
        await queue.submit(version)
    assert queue.outstanding == 2
    assert folders(tmp_path) == ["version-00000002", "version-00000004"]
    snapshots.version = 99  # training went on; the snapshots did not change
    snapshots.go.set()
    await queue.drain()
    assert snapshots.measured == [(2, ["2"]), (4, ["4"])]
    points = queue.take_finished(current_version=7)
    assert [p.version for p in points] == [2, 4]
    assert [p.metrics["eval/lag_steps"] for p in points] == [5.0, 3.0]
    assert all(p.metrics["eval/t/reward"] == 0.5 for p in points)
    assert {"eval/export_time_seconds", "eval/duration_seconds", "eval/version"} <= points[0].metrics.keys()
    assert folders(tmp_path) == []
    assert queue.take_finished(current_version=7) == []


async def test_backpressure_waits_for_the_oldest(tmp_path: Path) -> None:
    snapshots = Snapshots()
    queue = SnapshotEvaluation(
        evaluator=snapshots, export=snapshots.export, directory=tmp_path, max_outstanding=1, keep=1
    )
    await queue.submit(1)
    second = asyncio.create_task(queue.submit(2))
    await asyncio.sleep(0.01)
    assert not second.done()
    assert folders(tmp_path) == ["version-00000001"], "the second is not even exported"
    snapshots.go.set()
    await second
    await queue.drain()
    assert [v for v, _ in snapshots.measured] == [1, 2]
    assert folders(tmp_path) == ["version-00000002"], "the newest measured one is kept"


async def test_skip_leaves_a_point_out(tmp_path: Path) -> None:
    snapshots = Snapshots()
    queue = SnapshotEvaluation(
        evaluator=snapshots,
        export=snapshots.export,
        directory=tmp_path,
        max_outstanding=1,
        overflow=Overflow.SKIP,
    )
    await queue.submit(1)
    await queue.submit(2)
    (point,) = queue.take_finished(current_version=3)
    assert (point.version, point.skipped) == (2, "busy: 1 are outstanding")
    assert point.metrics == {"eval/skipped_busy": 1.0}
    await queue.close()
    assert folders(tmp_path) == [], "nothing of a cancelled evaluation stays"


async def test_every_failure_is_a_skipped_point_and_is_cleaned_up(tmp_path: Path) -> None:
    async def crash(version: int, checkpoint: Path | None) -> Mapping[str, float]:
        if version == 1:
            raise ZeroDivisionError("oh")
        if version == 2:
            raise EvaluationSkippedError("unhealthy", "engine 3 is gone")
        await asyncio.sleep(600)
        return {}

    snapshots = Snapshots()
    queue = SnapshotEvaluation(
        evaluator=crash, export=snapshots.export, directory=tmp_path, timeout_s=0.05, max_outstanding=9
    )
    for version in (1, 2, 3):
        await queue.submit(version)
    await queue.drain()

    async def full_disk(folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    queue._export = full_disk
    await queue.submit(4)
    points = queue.take_finished(current_version=9)
    assert [p.skipped for p in points] == [
        "crashed: ZeroDivisionError: oh",
        "unhealthy: engine 3 is gone",
        "timeout: took longer than 0.05 s",
        "export_failed: OSError: [Errno 28] No space left on device",
    ]
    assert all("eval/lag_steps" not in p.metrics for p in points)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("bad", [{"max_outstanding": 0}, {"keep": -1}])
def test_bad_limits_are_refused(bad: dict, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=next(iter(bad))):
        SnapshotEvaluation(evaluator=None, export=None, directory=tmp_path, **bad)


# -- dedicated engines ------------------------------------------------------------------------------------


def dedicated(engines: list[MemoryEngine], **options) -> DedicatedEvaluator:
    router = Router(engines)
    generate = single_turn(
        renderer=BytesRenderer(),
        router=router,
        reward=lambda task, text: 1.0,
        sampling=SamplingParams(max_new_tokens=4),
        run_seed=0,
    )
    held_out = HeldOut(name="t", source=CountingTasks(), generate=generate, prompts=6)
    return DedicatedEvaluator(engines=engines, router=router, tasks=[held_out], **options)


async def test_dedicated_engines_measure_exactly_the_snapshot(tmp_path: Path) -> None:
    engines = [MemoryEngine(f"http://eval-{i}") for i in range(2)]
    metrics = await dedicated(engines)(7, tmp_path)
    assert all(e.loaded == [(tmp_path, 7)] for e in engines)
    assert metrics["eval/t/reward"] == 1.0
    assert metrics["eval/t/weight_version/mean"] == 7
    assert metrics["eval/t/weight_version/mixed_version_ratio"] == 0


async def test_an_engine_with_another_version_is_a_violation(tmp_path: Path) -> None:
    class Stubborn(MemoryEngine):
        async def load_from_disk(self, path, version) -> None:
            self.version = 3

    with pytest.raises(EvaluationSkippedError, match="eval-1 serves 3, not 7") as caught:
        await dedicated([MemoryEngine("http://eval-0"), Stubborn("http://eval-1")])(7, tmp_path)
    assert caught.value.kind == "pin_violation"


async def test_an_engine_that_changes_its_version_meanwhile_is_a_violation(tmp_path: Path) -> None:
    class Fickle(MemoryEngine):
        async def generate(self, *args, **kwargs):
            result = await super().generate(*args, **kwargs)
            self.version = 8
            return result

    with pytest.raises(EvaluationSkippedError, match="not 7"):
        await dedicated([Fickle("http://eval-0")])(7, tmp_path)


async def test_a_dead_engine_is_unhealthy(tmp_path: Path) -> None:
    dead = MemoryEngine("http://eval-0")
    dead.dead = True
    with pytest.raises(EvaluationSkippedError) as caught:
        await dedicated([dead])(7, tmp_path)
    assert caught.value.kind == "unhealthy"
    slow = MemoryEngine("http://eval-0")
    slow.hung.clear()
    with pytest.raises(EvaluationSkippedError, match="unhealthy"):
        await dedicated([slow], load_s=0.02)(7, tmp_path)


async def test_dedicated_misuse_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="checkpoint"):
        await dedicated([MemoryEngine("http://e")])(7, None)
    with pytest.raises(InvalidFieldError, match="engines"):
        DedicatedEvaluator(engines=[], router=Router([MemoryEngine("http://e")]), tasks=[])


# -- external commands ------------------------------------------------------------------------------------


def command(code: str) -> ExternalEvaluator:
    return ExternalEvaluator([sys.executable, "-c", code, "{checkpoint}", "{version}"], environment={"X_TEST": "yes"})


async def test_any_program_can_evaluate(tmp_path: Path) -> None:
    code = """
import json, os, sys
print("loading", file=sys.stderr)
print("some progress")
print(json.dumps({"arc/reward": 0.25, "folder": os.path.isdir(sys.argv[1]), "version": int(sys.argv[2])}))
"""
    with pytest.raises(EvaluationSkippedError, match="no object of numbers"):
        await command(code)(12, tmp_path)  # a boolean is no number
    fixed = code.replace("os.path.isdir(sys.argv[1])", "float(os.environ['X_TEST'] == 'yes')")
    assert await command(fixed)(12, tmp_path) == {"eval/arc/reward": 0.25, "eval/folder": 1.0, "eval/version": 12.0}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('no GPU')", "ended with status 1: no GPU"),
        ("import sys; sys.exit(3)", "ended with status 3 and printed nothing"),
        ("import sys; print('no GPU'); sys.exit(3)", "ended with status 3: no GPU"),
        ("print('done')", "no object of numbers: 'done'"),
        ("pass", "no object of numbers: ''"),
        ("print('{}')", "at least one number"),
        ("print('{\"a\": NaN}')", "no object of numbers"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
async def test_a_program_that_fails_is_a_skipped_point(code: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationSkippedError, match="crashed") as caught:
        await command(code)(1, tmp_path)
    assert reason in caught.value.reason


async def test_a_slow_program_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(mark)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    running = asyncio.create_task(command(code)(1, tmp_path))
    while not _text(mark):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for pid in _text(mark).split():
        while _alive(int(pid)):  # noqa: ASYNC110 - the kernel takes a moment
            await asyncio.sleep(0.01)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_external_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="name a program"):
        ExternalEvaluator([])
    with pytest.raises(InvalidFieldError, match="use {checkpoint}"):
        ExternalEvaluator(["echo"])
    with pytest.raises(InvalidFieldError, match="folder"):
        await command("pass")(1, None)
    with pytest.raises(EvaluationSkippedError, match="cannot be started: No such file"):
        await ExternalEvaluator(["/no/such/program", "{checkpoint}"])(1, tmp_path)


def test_points_are_records() -> None:
    point = EvalPoint.skip(3, "busy", "why").with_metrics(version=3.0)
    assert json.loads(json.dumps(point.metrics)) == {"eval/skipped_busy": 1.0, "eval/version": 3.0}
