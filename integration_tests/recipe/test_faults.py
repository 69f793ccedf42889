"""A run with two engines to which everything happens: it goes on, and every prompt is accounted for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from recipe_runs import SMALL, Shell, alive, descendants, records, start_engine, wait_for

from miles_loop.checkpoint import newest_checkpoint, read_checkpoint
from miles_qwen3.model import build_tiny

USER_CODE = """
import asyncio

from miles_contracts import FilterDecision
from miles_qwen3.guessing import play
from miles_qwen3.sorting import closeness


async def reward(task, response):
    if task.prompt_index % 8 == 3:
        raise RuntimeError("the judge crashed")
    if task.prompt_index % 8 == 6:
        await asyncio.Event().wait()
    return await closeness(task, response)


def keep(group):
    return FilterDecision(keep=group.prompt_index % 8 != 5, reason="told_to")


async def agent(base_url, task, params, metadata):
    if task.prompt_index % 4 == 1:
        await asyncio.Event().wait()
    if task.prompt_index % 4 == 2:
        raise RuntimeError("the sandbox is gone")
    return await play(base_url, task, params, metadata)
"""
MEASURE = """
import json
import os
import sys

if sys.argv[2] == "1":
    sys.exit("the harness crashed")
files = set(os.listdir(sys.argv[1]))
assert files >= {"model.safetensors", "config.json", "tokenizer.json"}, files
print(json.dumps({"files/reward": len(files)}))
"""
"""A program that is no use as an evaluation but sees what one would be given."""

NEVER_TRAINED = {3, 5, 6}
"""Prompts (modulo 8) whose reward raises or hangs, or which the filter refuses."""

EVERY_STEP = {
    "rollout/fully_async/queue_size",
    "rollout/fully_async/queue_bytes",
    "rollout/fully_async/aborted_groups_filtered",
    "rollout/fully_async/stale_groups_filtered",
    "rollout/fully_async/unknown_version_groups_filtered",
    "rollout/fully_async/avg_staleness",
    "rollout/fully_async/max_staleness",
    "rollout/fully_async/in_flight_groups",
    "rollout/fully_async/in_flight_trajectories",
    "rollout/fully_async/in_flight_tokens",
    "rollout/fully_async/retries",
    "rollout/fully_async/given_up_prompts",
    "rollout/fully_async/generation_span",
    "rollout/fully_async/queue_wait",
    "rollout/fully_async/publish_lag",
    "rollout/fully_async/wasted_tokens",
    "rollout/weight_version/mixed_version_ratio",
    "rollout/bias/trained_trajectories",
    "rollout/bias/trained_length",
    "rollout/bias/trained_reward",
    "rollout/bias/dropped_trajectories",
    "rollout/failed_ratio",
    "rollout/token_mismatches",
    "perf/rollout_producer_wait_s",
    "perf/rollout_trainer_wait_s",
    "perf/rollout_generation_s",
    "perf/rollout_queue_wait_s",
    "perf/collect_wait_s",
    "perf/train_s",
    "perf/update_weights_s",
    "router/engines_serving",
    "router/outstanding_tokens",
    "router/reissued_turns",
    "router/quarantines",
    "router/engine_restarts",
    "router/engine_0/turns",
    "router/engine_1/turns",
}
SOME_STEP = {
    "rollout/prefix_cache_hit_rate",
    "rollout/fully_async/buffer_avg_staleness",
    "rollout/fully_async/buffer_max_staleness",
    "rollout/dynamic_filter/drop_told_to",
    "rollout/bias/dropped_length",
    "rollout/bias/dropped_reward",
    "router/engine_0/prefix_cache_hit_rate",
    "router/engine_1/prefix_cache_hit_rate",
    "eval/version",
    "eval/lag_steps",
    "eval/export_time_seconds",
    "eval/files/reward",
    "eval/skipped_crashed",
}
"""Of what does not happen in every step."""


def status(run: Path) -> dict[str, Any]:
    """What the run folder says."""
    return json.loads((run / "status.json").read_text())  # type: ignore[no-any-return]


def log(run: Path) -> str:
    """What the driver logged."""
    return (run / "logs" / "driver.log").read_text()


def steps(run: Path) -> list[dict[str, Any]]:
    """The records of steps; evaluations of earlier versions have lines of their own."""
    return [r for r in records(run) if "train/loss" in r]


def children(process: subprocess.Popen[str], word: str) -> list[int]:
    """The processes that a run has started and whose command line has this word, without their guards."""
    return [pid for pid, line in descendants(process.pid).items() if word in line and os.getpgid(pid) == pid]


def wait_for_steps(run: Path, process: subprocess.Popen[str], more: int) -> None:
    """Wait until so many more steps are done."""
    target = status(run)["step"] + more
    wait_for(lambda: status(run)["step"] >= target, process)


def lose_engines(run: Path, process: subprocess.Popen[str]) -> None:
    """One engine is killed, then the other one hangs; each comes back."""
    engines = children(process, "miles_rollout.engine")
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)
    wait_for(lambda: log(run).count("serves again, version") == 1, process)
    os.kill(engines[1], signal.SIGSTOP)
    wait_for(lambda: log(run).count("serves again, version") == 2, process)
    assert "has not answered for 3 s" in log(run)


def accounted_for(run: Path, never: set[int]) -> None:
    """Every prompt that was drawn is trained once, waits, or is one that cannot be trained (modulo 8)."""
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained))
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    rollout = read_checkpoint(checkpoint).rollout
    waiting = {i.prompt_index for i in rollout.again} | {e.group.prompt_index for e in rollout.entries}
    assert not waiting & set(trained)
    missing = set(range(rollout.source["next"])) - set(trained) - waiting
    assert {prompt % 8 for prompt in missing} <= never
    assert not {prompt % 8 for prompt in trained} & never


@pytest.mark.gate
@pytest.mark.timeout(600)
def test_everything_happens_to_one_run(shell: Shell, tmp_path: Path) -> None:
    """Engines killed and hung, rewards that raise and hang, an evaluation that crashes, trainer and driver killed."""
    (tmp_path / "user_code.py").write_text(USER_CODE)
    (tmp_path / "measure.py").write_text(MEASURE)
    run = tmp_path / "run"
    options = ("--engine.replicas", 2, "--pipeline-depth", 2, "--checkpoint-every", 2, "--steps", 100000)
    options += ("--engine.hang_s", 3, "--router.health_interval_s", 0.5, "--router.health_deadline_s", 2)
    options += ("--task.reward", "user_code:reward", "--task.eval_reward", "exact", "--rollout.reward_timeout_s", 0.3)
    options += ("--rollout.max_attempts", 2, "--rollout.filter", "user_code:keep", "--record.plot", "false")
    options += ("--evaluation.mode", "external", "--evaluation.every", 1, "--evaluation.overflow", "skip")
    command = [sys.executable, str(tmp_path / "measure.py"), "{checkpoint}", "{version}"]
    options += ("--evaluation.command", json.dumps(command))
    small = [word for word in SMALL if word not in ("--rollout.filter", "none")]
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *small)
    wait_for(lambda: len(steps(run)) >= 2, process)
    lose_engines(run, process)
    wait_for_steps(run, process, 2)
    (trainer,) = children(process, "miles_loop.trainer_process")
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: "going back to" in log(run), process)
    wait_for(lambda: status(run)["counters"]["trainer_restarts"] == 1 and status(run)["status"] == "running", process)
    wait_for_steps(run, process, 3)
    below = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid, line in below.items() if "measure.py" not in line))
    last = status(run)["step"] + 2
    shell.run("miles-qwen3", "train", "--resume", run, "--steps", last)
    assert status(run)["status"] == "finished"
    accounted_for(run, NEVER_TRAINED)
    found = steps(run)
    assert [r["step"] for r in found] == list(range(1, last + 1))
    assert all(r["rollout/token_mismatches"] == 0 for r in found)
    assert all(r.keys() >= EVERY_STEP for r in found), [sorted(EVERY_STEP - r.keys()) for r in found]
    seen = {key for r in records(run) for key in r}
    assert seen >= SOME_STEP, SOME_STEP - seen
    report = json.loads((run / "summary.json").read_text())
    assert report["prompts_given_up"] > 0
    assert report["bias"]["dropped"]["answers"] > 0
    assert "the judge crashed" in log(run)
    assert "reward gave no answer within 0.3 s" in log(run)


@pytest.mark.gate
def test_agents_that_hang_or_fail_cost_their_episodes_only(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "user_code.py").write_text(USER_CODE)
    run = tmp_path / "run"
    options = ("--task", "guess", "--task.agent", "user_code:agent", "--steps", 3, "--rollout.timeout_s", 6)
    options += ("--rollout.max_attempts", 1, "--evaluation.at_start", "false", "--evaluation.at_end", "false")
    shell.run("miles-qwen3", "train", "--run-dir", run, "--engine.replicas", 2, *options, *SMALL)
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert not {prompt % 4 for prompt in trained} & {1, 2}
    assert sum(r["rollout/fully_async/aborted_groups_filtered"] for r in records(run)) > 0
    assert all(r["rollout/token_mismatches"] == 0 for r in records(run))
    assert "the sandbox is gone" in log(run)


class SpoilingProxy:
    """Stands before an engine, in a thread of its own, and passes everything on; answers of generations are spoilt
    as `fault` says."""

    def __init__(self, target: str) -> None:
        self.fault = ""
        self._target = target
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self.fault == "down":
            return web.Response(status=503, text="restarting")
        if request.path == "/generate" and self.fault == "500":
            return web.Response(status=500, text="CUDA error: an illegal memory access was encountered")
        async with ClientSession(self._target) as session:
            data = await request.read()
            async with session.request(request.method, request.path_qs, data=data, headers=_TYPE) as got:
                body, code = await got.read(), got.status
        if request.path == "/generate" and self.fault == "garbage":
            body = body[: len(body) // 2]
        return web.Response(body=body, status=code, content_type="application/json")


_TYPE = {"Content-Type": "application/json"}


@pytest.mark.gate
@pytest.mark.timeout(600)
def test_an_attached_engine_that_answers_nonsense_is_left_until_it_is_well(shell: Shell, tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    build_tiny(model, 0)
    (good, _), (bad, _) = start_engine(shell, model), start_engine(shell, model)
    proxy = SpoilingProxy(bad)
    try:
        options = ("--model", model, "--engine.urls", f"{good},{proxy.url}", "--steps", 100000)
        options += (
            "--router.health_interval_s",
            0.3,
            "--engine.hang_s",
            2,
            "--evaluation.at_start",
            "false",
            "--pipeline-depth",
            2,
        )
        process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
        wait_for(lambda: len(steps(run)) >= 2, process)
        for count, fault in enumerate(("500", "garbage"), start=1):
            proxy.fault = fault
            wait_for(lambda count=count: log(run).count(f"{proxy.url} is out of service") == count, process)
            wait_for_steps(run, process, 2)
            proxy.fault = ""
            wait_for(lambda count=count: log(run).count(f"{proxy.url} serves again") >= count, process)
            wait_for(lambda: steps(run)[-1]["router/engine_1/turns"] > 0, process)
        proxy.fault = "down"
        # Whichever comes first: a weight update that it does not take part in, or the end of the run's patience.
        gone = (f"{proxy.url} is out of service: fenced", f"{proxy.url} is out of service: no answer for 2 s")
        wait_for(lambda: any(text in log(run) for text in gone), process)
        wait_for_steps(run, process, 2)
        proxy.fault = ""
        wait_for(lambda: f"engine {proxy.url} serves again, version" in log(run), process)
        wait_for(lambda: steps(run)[-1]["router/engine_1/turns"] > 0, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, out + err
    finally:
        proxy.close()
    found = steps(run)
    assert sum(r["router/reissued_turns"] for r in found) > 0
    assert sum(r["router/quarantines"] for r in found) >= 2
    assert all(r["rollout/token_mismatches"] == 0 for r in found)
    assert sum(r["rollout/fully_async/aborted_groups_filtered"] for r in found) == 0, "a turn finds another engine"
    accounted_for(run, never=set())
