"""An engine that hangs is replaced; a trainer that dies costs what came after the newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from loop_toy.harness import Command, children, named_child, records, wait_for, wait_for_records, without_clock

HANG = ("--engine.hang_s", 1, "--router.health_interval_s", 0.2, "--router.health_deadline_s", 1)


def status(run: Path) -> dict[str, Any]:
    """What the run folder says."""
    return json.loads((run / "status.json").read_text())  # type: ignore[no-any-return]


def trained_prompts(run: Path) -> list[int]:
    """In the order of training."""
    return [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]


def test_an_engine_that_hangs_is_killed_and_comes_back(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--pipeline-depth", 2, "--engine.replicas", 2, *HANG)
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.05")
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "loop_toy.engine"), signal.SIGSTOP)
    log = run / "logs" / "driver.log"
    wait_for(lambda: "serves again, version" in log.read_text())
    assert "has not answered for 1 s" in log.read_text()
    assert "was killed by the run: it hung, without an answer for 1 s" in log.read_text()
    seen = len(records(run))
    wait_for_records(process, run, seen + 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert status(run)["counters"]["engine_restarts"] == 1
    trained = trained_prompts(run)
    assert len(trained) == len(set(trained))
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in records(run))
    assert sum(r.get("router/engine_restarts", 0) for r in records(run)) == 1


def test_a_dead_trainer_is_a_detour_that_cannot_be_seen_afterwards(fast: Command, tmp_path: Path) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    options = ("--plain", "--steps", 8, "--pipeline-depth", 0, "--checkpoint-every", 2)
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.2")
    wait_for_records(process, run, 5)
    os.kill(named_child(process.pid, "loop_toy.trainer"), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "going back to" in out
    assert status(run)["counters"]["trainer_restarts"] == 1
    fast.run("train", "--run-dir", calm, *options)
    assert without_clock(records(run)) == without_clock(records(calm))
    assert records(run, "ledger.jsonl") == records(calm, "ledger.jsonl")
    assert json.loads((run / "summary.json").read_text())["trainer_restarts"] == 1


def test_a_trainer_that_dies_too_often_ends_the_run_by_name(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--checkpoint-every", 1, "--runtime.trainer_restarts", 1)
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.05")
    wait_for_records(process, run, 4)
    first = named_child(process.pid, "loop_toy.trainer")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: [c for c in children(process.pid) if c != first and _is_trainer(c)])
    os.kill(named_child(process.pid, "loop_toy.trainer"), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert "process trainer was killed by SIGKILL" in err
    assert (status(run)["status"], status(run)["reason"]) == ("failed", "process_died")
    fast.run("train", "--resume", run, "--plain", "--steps", status(run)["step"] + 2)
    trained = trained_prompts(run)
    assert len(trained) == len(set(trained))


def _is_trainer(pid: int) -> bool:
    try:
        return "loop_toy.trainer" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_what_a_run_is_told_about_its_rollout_is_heeded(fast: Command, tmp_path: Path) -> None:
    """A reward for whole groups, a filter of the user's, a failed answer sampled again, a bound in flight."""
    run = tmp_path / "run"
    options = ("--plain", "--steps", 6, "--pipeline-depth", 3, "--rollout.max_in_flight", 4)
    options += ("--task.reward", "loop_toy.scores:ranks", "--task.reward_scope", "group")
    options += ("--rollout.filter", "loop_toy.scores:even", "--rollout.granularity", "group")
    fast.run("train", "--run-dir", run, *options)
    found = [r for r in records(run) if r["step"]]
    assert all(r["rollout/reward_trained"] == 1.5 for r in found), "ranks 0, 1, 2, 3 of four answers"
    assert records(run)[-1]["eval/vowels/reward"] == 0, "one answer a prompt has rank 0"
    assert {prompt % 2 for prompt in trained_prompts(run)} == {0}
    assert sum(r.get("rollout/dynamic_filter/drop_even", 0) for r in found) > 0
    assert max(r["rollout/fully_async/in_flight_trajectories"] for r in found) <= 4
    assert all(r["rollout/bias/dropped_reward"] == 1.5 for r in found if "rollout/bias/dropped_reward" in r)


def test_a_failed_answer_is_sampled_again_and_its_group_kept(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 4, "--rollout.replace_members", 8)
    fast.run("train", "--run-dir", run, *options, "--task.reward", "loop_toy.scores:sometimes")
    found = [r for r in records(run) if r["step"]]
    assert sum(r["rollout/fully_async/replaced_members"] for r in found) > 0
    assert sum(r["rollout/fully_async/aborted_groups_filtered"] for r in found) == 0
    assert sum(r["rollout/fully_async/wasted_tokens"] for r in found) > 0
    assert all(r["rollout/token_mismatches"] == 0 for r in found)


def test_rewards_of_many_answers_at_once(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task.reward", "loop_toy.scores:lengths", "--task.reward_scope", "batch")
    fast.run("train", "--run-dir", run, "--plain", "--steps", 2, *options)
    assert all(r["rollout/reward_trained"] >= 0 for r in records(run) if r["step"])
