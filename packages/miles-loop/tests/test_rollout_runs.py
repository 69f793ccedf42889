"""Runs whose answers are made by rollout workers: the same run, and one that survives the loss of a worker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from loop_toy.harness import Command, named_child, records, wait_for, wait_for_records, without_clock

from miles_loop.report import make_report

TASKS = {
    "one answer": (),
    "groups that are replaced": ("--rollout.filter", "no_signal", "--rollout.sampling.max_new_tokens", 2),
    "a family of tasks": ("--task", "sums", "--task.reward", "verifier"),
}


def workers(count: int) -> tuple[object, ...]:
    return ("--runtime.rollout_workers", count)


@pytest.mark.parametrize(
    "task",
    [pytest.param(name, marks=() if name == "one answer" else pytest.mark.gate) for name in TASKS],
)
def test_with_one_worker_at_depth_0_it_is_the_same_run(fast: Command, tmp_path: Path, task: str) -> None:
    if task == "a family of tasks":
        pytest.importorskip("reasoning_gym")
    options = ("--plain", "--steps", 4, "--pipeline-depth", 0, "--evaluation.every", 2, *TASKS[task])
    for name, count in (("here", 0), ("there", 1)):
        fast.run("train", "--run-dir", tmp_path / name, *options, *workers(count))
    here, there = tmp_path / "here", tmp_path / "there"
    assert without_clock(records(here)) == without_clock(records(there))
    assert records(here, "ledger.jsonl") == records(there, "ledger.jsonl")
    assert (there / "logs" / "rollout-0.log").exists()


def test_an_evaluation_by_workers_finds_the_same(fast: Command) -> None:
    # What is late is said on the other stream, which is part of the output here.
    said = [fast.run("eval", "--json", *workers(count)) for count in (0, 2)]
    here, there = ([line for line in text.splitlines() if line.startswith("{")] for text in said)
    assert here == there
    assert "eval/vowels/reward" in json.loads(here[0])


def test_an_agents_sessions_are_in_the_workers_and_their_audit_reaches_the_run(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--steps", 3, "--task.agent", "loop_toy.agent:careless", *workers(2))
    fast.run("train", "--run-dir", run, "--plain", *options)
    found = [r for r in records(run) if r["step"] > 0]
    assert len(found) == 3
    assert all(r["rollout/token_mismatches"] == 0 and r["rollout/tokens_trained"] > 0 for r in found)
    assert sum(r["rollout/session/tokens_audited"] for r in found) >= sum(r["rollout/tokens_trained"] for r in found)
    assert sum(r["rollout/session/abandoned_turns"] for r in found) > 0
    assert all(r["router/rollout_workers"] == 2 for r in found)
    assert "eval/vowels/reward" in records(run)[0]


def test_a_killed_worker_costs_what_it_had_under_way(fast: Command, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "run" / "logs" / "driver.log"
    options = ("--plain", "--steps", 100000, *workers(2))
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.05", FAKE_TOKEN_S="0.01")
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "rollout_process"), signal.SIGKILL)
    wait_for(lambda: " is back" in log.read_text())
    seen = len(records(run))
    wait_for_records(process, run, seen + 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "was killed by SIGKILL (out of memory, or somebody killed it); starting it again" in log.read_text()
    found = records(run)
    assert sum(r.get("router/rollout_worker_restarts", 0) for r in found) == 1
    assert found[-1]["router/rollout_workers"] == 2
    assert make_report(run).rollout_worker_restarts == 1
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in found)
    assert all(r.get("rollout/failed_ratio", 0) == 0 for r in found), "its answers were made elsewhere"
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained))


def test_without_restarts_the_run_ends_by_name_and_can_be_continued(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--checkpoint-every", 1, "--runtime.rollout_restarts", 0, *workers(1))
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.05")
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "rollout_process"), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "process rollout-0 was killed by SIGKILL" in err
    assert "no rollout worker is left" in err
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "process_died")
    fast.run("train", "--resume", run, "--plain", "--steps", status["step"] + 2)
    assert records(run)[-1]["step"] == status["step"] + 2


@pytest.mark.gate
def test_a_hanging_worker_is_killed_by_name(fast: Command, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "run" / "logs" / "driver.log"
    options = ("--plain", "--steps", 100000, "--runtime.rollout_hang_s", 1, *workers(1))
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.05")
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "rollout_process"), signal.SIGSTOP)
    wait_for(lambda: "rollout-0 is back" in log.read_text())
    assert "was killed by the run: it hung, without a word for 1 s (runtime.rollout_hang_s)" in log.read_text()
    seen = len(records(run))
    wait_for_records(process, run, seen + 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


@pytest.mark.gate
def test_an_engine_that_dies_is_taken_from_the_workers_and_given_back(fast: Command, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "run" / "logs" / "driver.log"
    options = ("--plain", "--steps", 100000, "--engine.replicas", 2, *workers(2))
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.05")
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "loop_toy.engine"), signal.SIGKILL)
    wait_for(lambda: "serves again, version" in log.read_text())
    wait_for(lambda: records(run)[-1]["router/engines_serving"] == 2)
    seen = len(records(run))
    wait_for_records(process, run, seen + 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "out of service" in "".join((run / "logs" / f"rollout-{i}.log").read_text() for i in range(2))
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in records(run))


def test_a_reward_that_raises_is_named_with_file_and_line(fast: Command, tmp_path: Path) -> None:
    options = ("--task.reward", "loop_toy.recipe:raising", "--evaluation.at_start", "false", *workers(1))
    out = fast.run("train", "--run-dir", tmp_path / "run", "--plain", *options, status=1)
    assert "groups in a row failed" in out
    assert "RuntimeError: the reward is broken (" in out
    assert "recipe.py:" in out
    assert "Traceback" in (tmp_path / "run" / "logs" / "rollout-0.log").read_text()


def test_sglangs_router_does_not_go_with_workers(fast: Command, tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    options = ("--engine.router", "sglang", *workers(1))
    out = fast.run("train", "--run-dir", tmp_path / "run", "--plain", *options, status=2)
    assert "runtime.rollout_workers: got 1" in out
