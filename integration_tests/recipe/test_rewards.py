"""Rewards that are given elsewhere, in whole runs: by a service that fails in every way, by running the answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import SMALL, Shell, records, wait_for
from tokenizers import Tokenizer

from miles_contracts import Group, Trajectory, wire
from miles_rollout.rewards import Sandbox
from miles_rollout.rewards.sandbox import SandboxError

SERVICE = '''
"""Scores answers above 1, so that a reward of 0 is nobody's; every 5th, 9th and 11th request is treated badly."""
import asyncio
import collections
import sys

from aiohttp import web

from miles_contracts import Task
from miles_qwen3.sorting import closeness

counts = collections.Counter()


async def score(request):
    body = await request.json()
    counts["requests"] += 1
    number = counts["requests"]
    if number % 11 == 0:
        counts["garbage"] += 1
        return web.Response(text="<html>a proxy's page</html>", content_type="text/html")
    if number % 9 == 0:
        counts["hung"] += 1
        await asyncio.Event().wait()
    if number % 5 == 0:
        counts["500"] += 1
        return web.Response(status=500, text="CUDA out of memory")
    counts["good"] += 1
    task = Task(prompt_index=body["prompt_index"], messages=(), label=body["label"])
    return web.json_response({"reward": 1.0 + await closeness(task, body["response"])})


async def stats(_):
    return web.json_response(dict(counts))


async def main():
    app = web.Application()
    app.router.add_post("/score", score)
    app.router.add_get("/stats", stats)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with open(sys.argv[1] + ".part", "w") as where:
        where.write(f"http://127.0.0.1:{runner.addresses[0][1]}")
    import os

    os.rename(sys.argv[1] + ".part", sys.argv[1])
    await asyncio.Event().wait()


asyncio.run(main())
'''
REMOTE = ("--task.reward_request_timeout_s", 2, "--task.reward_retries", 1, "--record.trajectories", 1000)


UNMEASURED = ("--evaluation.at_start", "false", "--evaluation.at_end", "false")


def service(shell: Shell, tmp_path: Path) -> str:
    """The URL of a running reward service."""
    (tmp_path / "service.py").write_text(SERVICE)
    process = shell.start(sys.executable, tmp_path / "service.py", tmp_path / "where")
    wait_for((tmp_path / "where").exists, process)
    return (tmp_path / "where").read_text()


def stats(url: str) -> dict[str, int]:
    """What the service says it did."""
    with urllib.request.urlopen(f"{url}/stats", timeout=60) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def trained(run: Path) -> list[Trajectory]:
    """Every trajectory that was trained."""
    files = sorted((run / "trajectories").glob("step_*.mls"))
    return [t for file in files for group in wire.decode(file.read_bytes(), list[Group]) for t in group]


def check_steps(run: Path, steps: int) -> list[dict[str, Any]]:
    """The records of all steps, their tokens audited."""
    found = [r for r in records(run) if "train/loss" in r]
    assert [r["step"] for r in found] == list(range(1, steps + 1))
    assert all(r["rollout/token_mismatches"] == 0 and r["rollout/tokens_trained"] > 0 for r in found)
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    return found


def check_failing_service(run: Path, url: str, steps: int) -> list[dict[str, Any]]:
    """The run did its steps on rewards that were given, and told of all others."""
    found, told = check_steps(run, steps), stats(url)
    assert min(told[name] for name in ("500", "hung", "garbage", "good")) > 0, "the service has not done its worst"
    counted = {n: sum(r[f"rollout/reward_service/{n}"] for r in found) for n in ("requests", "retries", "failed")}
    assert 0 < counted["retries"] < counted["requests"]
    assert counted["failed"] > 0
    assert sum(r["rollout/fully_async/aborted_groups_filtered"] for r in found) > 0
    log = (run / "logs" / "driver.log").read_text()
    assert f"answers got no reward, the last: {url}/score" in log
    trajectories = trained(run)
    assert len(trajectories) == steps * 8
    assert all(t.reward is not None and 1.0 <= t.reward <= 2.0 for t in trajectories), "a failure is no reward of zero"
    return found


def test_a_service_that_fails_hangs_and_answers_nonsense(shell: Shell, tmp_path: Path) -> None:
    url, run = service(shell, tmp_path), tmp_path / "run"
    options = ("--task.reward", f"{url}/score", "--steps", 3, "--rollout.max_attempts", 9, *REMOTE, *UNMEASURED)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    check_failing_service(run, url, 3)


@pytest.mark.gate
@pytest.mark.timeout(1200)
def test_a_policy_learns_from_a_service_that_fails(shell: Shell, tmp_path: Path) -> None:
    """With several engines and failed members sampled again."""
    url, run = service(shell, tmp_path), tmp_path / "run"
    options = ("--task.reward", f"{url}/score", "--steps", 60, "--rollout.max_attempts", 9, *REMOTE)
    options += ("--engine.replicas", 2, "--rollout.replace_members", 4, "--rollout.filter", "none")
    options += ("--rollout.groups_per_step", 8, "--rollout.group_size", 8)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, timeout=1100)
    found = check_steps(run, 60)
    first, last = (sum(r["rollout/reward"] for r in part) / 10 for part in (found[:10], found[-10:]))
    assert last > first + 0.1
    assert sum(r["rollout/reward_service/failed"] for r in found) > 0
    assert sum(r["rollout/fully_async/replaced_members"] for r in found) > 0
    assert all(t.reward is not None and t.reward >= 1.0 for t in trained(run))


def runs_silently(program: str, file: Path) -> bool:
    """Whether Python runs it to its end without a word, outside of any sandbox (one token can do no harm)."""
    file.write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, "-I", file], capture_output=True, check=False, timeout=60)
    return done.returncode == 0 and not done.stdout


def test_answers_are_programs_that_run_in_the_sandbox(shell: Shell, tmp_path: Path) -> None:
    """A digit or nothing at all is a program, most other single tokens are none: a beginner writes both."""
    try:
        asyncio.run(Sandbox().run("pass"))
    except SandboxError as error:
        pytest.skip(str(error))
    prompts, run = tmp_path / "prompts.jsonl", tmp_path / "run"
    metadata = {"tests": [{"input": "", "output": ""}]}
    prompts.write_text("\n".join(json.dumps({"prompt": f"sort {n}", "metadata": metadata}) for n in range(4)))
    options = ("--task", prompts, "--task.reward", "code", "--task.eval_size", 0, "--rollout.filter", "none")
    options += ("--rollout.groups_per_step", 2, "--rollout.group_size", 16, "--rollout.sampling.max_new_tokens", 1)
    options += ("--steps", 2, "--pipeline-depth", 0, "--seed", 1, "--record.trajectories", 2)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options)
    found, trajectories = check_steps(run, 2), trained(run)
    assert len(trajectories) == 2 * 32
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    answers = [tokenizer.decode(t.token_ids[t.loss_mask].tolist()) for t in trajectories]
    works = {answer: float(runs_silently(answer, tmp_path / "answer.py")) for answer in set(answers)}
    assert [t.reward for t in trajectories] == [works[answer] for answer in answers]
    assert {0.0, 1.0} == set(works.values())
    assert all(r["rollout/failed_ratio"] == 0 for r in found)
