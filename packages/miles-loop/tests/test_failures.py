"""Whatever goes wrong has a name, ends every process, and leaves a run that can be continued."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from loop_toy.harness import Command, alive, children, named_child, records, wait_for, wait_for_records, without_clock

from miles_loop.checkpoint import list_checkpoints


def status(run: Path) -> dict[str, object]:
    """What the run folder says."""
    return json.loads((run / "status.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_killed_engine_is_replaced_and_the_run_goes_on(fast: Command, tmp_path: Path, depth: int) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    options = ("--plain", "--steps", 8, "--pipeline-depth", depth)
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.1")
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "loop_toy.engine"), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "was killed by SIGKILL" in out
    assert "serves again" in out
    assert status(run)["counters"]["engine_restarts"] == 1  # type: ignore[index]
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained)) == 16
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in records(run))
    if depth == 0:
        # The same prompts, seeds and weights: the loss of an engine cannot be seen in what was trained.
        fast.run("train", "--run-dir", calm, *options)
        assert without_clock(records(run)) == without_clock(records(calm))


def test_an_engine_that_is_not_replaced_ends_the_run_with_its_log(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = fast.start(
        "train", "--run-dir", run, "--plain", "--steps", 6, "--engine.restarts", 0, "--checkpoint-every", 1
    )
    wait_for_records(process, run, 3)
    os.kill(named_child(process.pid, "loop_toy.engine"), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert "process engine-0 was killed by SIGKILL" in err
    assert (status(run)["status"], status(run)["reason"]) == ("failed", "process_died")
    fast.run("train", "--resume", run, "--plain")
    assert records(run)[-1]["step"] == 6


def test_a_killed_trainer_ends_the_run_by_name(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = fast.start("train", "--run-dir", run, "--plain", "--steps", 200)
    wait_for_records(process, run, 2)
    others = children(process.pid)
    os.kill(named_child(process.pid, "loop_toy.trainer"), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert "process trainer was killed by SIGKILL" in err
    assert "run with --checkpoint-every N" in err
    wait_for(lambda: not any(alive(child) for child in others), 10)


def test_a_second_signal_ends_everything_at_once(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = fast.start("train", "--run-dir", run, "--plain", "--steps", 200, FAKE_STEP_S="3")
    wait_for_records(process, run, 1)
    time.sleep(0.3)
    others = children(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    wait_for(lambda: not any(alive(child) for child in others), 10)
    assert status(run)["status"] == "interrupted"


def test_one_signal_before_the_first_step_is_named(toy: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = toy.start("train", "--run-dir", run, "--plain")
    log = run / "logs" / "driver.log"
    wait_for(lambda: log.exists() and "starting engines and trainer" in log.read_text(), 60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "SIGTERM before the first step" in err
    assert (status(run)["status"], status(run)["message"]) == (
        "interrupted",
        "stopped at once by SIGTERM before the first step",
    )


def test_a_loss_that_is_not_finite_ends_the_run(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = fast.run("train", "--run-dir", run, "--plain", "--steps", 6, status=1, FAKE_NAN_STEP="3")
    assert "loss is NaN in micro-batch 0" in out
    assert (status(run)["reason"], status(run)["step"]) == ("non_finite", 2)


@pytest.mark.parametrize(
    ("reward", "why"),
    [("raising", "RuntimeError: the reward is broken"), ("not_a_number", "reward returned nan")],
)
def test_a_reward_that_fails_is_never_a_zero(fast: Command, tmp_path: Path, reward: str, why: str) -> None:
    run = tmp_path / "run"
    options = ("--task.reward", f"loop_toy.recipe:{reward}", "--evaluation.at_start", "false")
    out = fast.run("train", "--run-dir", run, "--plain", *options, status=1)
    assert "groups in a row failed" in out
    assert why in out
    assert status(run)["reason"] == "rollout_died"
    assert records(run) == []


def test_a_task_without_signal_warns_and_ends_the_run(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task.reward", "loop_toy.recipe:always_one", "--evaluation.at_start", "false")
    out = fast.run("train", "--run-dir", run, "--plain", "--rollout.filter", "no_signal", *options, status=1)
    assert "warning: the group filter dropped 128 groups in a row" in out
    assert "dropped 1024 groups in a row and kept none (zero_reward_variance: 1024)" in out
    assert "mean 1, from 1 to 1" in out
    assert status(run)["reason"] == "rollout_died"
    assert "dropped 128 groups" in (run / "logs" / "driver.log").read_text()


def test_empty_answers_are_trained_around(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 4, FAKE_EMPTY="1")
    found = [r for r in records(run) if r["step"]]
    assert min(r["rollout/response_length/min"] for r in found) == 0
    assert all(r["rollout/token_mismatches"] == 0 for r in found)


def test_an_agent_that_fails_ends_the_run_with_its_reason(fast: Command, tmp_path: Path) -> None:
    out = fast.run("train", "--run-dir", tmp_path / "run", "--plain", "--task.agent", "loop_toy.agent:broken", status=1)
    assert "the sandbox is gone" in out


def small_disk(path: Path, kib: int) -> None:
    """Mount a small file system, or skip where that is not allowed."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs the right to mount a small file system")


def test_a_full_disk_is_named_and_the_run_can_be_continued(fast: Command, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    small_disk(disk, 2200)
    try:
        run = disk / "run"
        options = ("--plain", "--steps", 6, "--pipeline-depth", 0, "--checkpoint-every", 2, "--checkpoint.keep", 3)
        out = fast.run("train", "--run-dir", run, *options, status=1, FAKE_MODEL_BYTES="700000")
        assert "no space left on the disk of" in out
        assert (status(run)["status"], status(run)["reason"]) == ("failed", "disk_full")
        left = sorted(p.name for p in (run / "checkpoints").iterdir())
        assert left
        assert left == [path.name for _, path in list_checkpoints(run / "checkpoints")]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        fast.run("train", "--resume", run, "--plain", FAKE_MODEL_BYTES="700000")
        fast.run("train", "--run-dir", tmp_path / "calm", *options, FAKE_MODEL_BYTES="700000")
        assert without_clock(records(run)) == without_clock(records(tmp_path / "calm"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_taken_port_is_refused(fast: Command, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        out = fast.run("train", "--run-dir", tmp_path / "run", "--plain", "--engine.port", port, status=2)
    assert f"engine.port: got '127.0.0.1:{port}'; cannot be listened on" in out


def test_a_process_that_does_not_start_shows_its_log(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = fast.run("train", "--run-dir", run, "--plain", status=1, FAKE_TOKEN_S="not a number")
    assert "process engine-0 ended with status 1" in out
    assert "could not convert string to float" in out


def test_bad_data_ends_the_processes_and_the_run(fast: Command, tmp_path: Path) -> None:
    run, bad = tmp_path / "run", tmp_path / "bad.jsonl"
    bad.write_text("{")
    out = fast.run("train", "--run-dir", run, "--plain", "--task", bad, "--steps", 1, status=2)
    assert "line 1: not JSON" in out
    assert "reward" not in out.lower(), "no summary of nothing"
    assert (status(run)["status"], status(run)["reason"]) == ("failed", "task_file")
    # Nothing was trained, so the folder is free for the command that was meant.
    fast.run("train", "--run-dir", run, "--plain", "--steps", 1, "--seed", 5)
    assert records(run)[-1]["step"] == 1
    assert "a run is there" in fast.run("train", "--run-dir", run, "--plain", status=2)


def test_a_folder_with_a_run_is_not_overwritten(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 1)
    before = (run / "metrics.jsonl").read_bytes()
    assert "a run is there; continue it with --resume" in fast.run("train", "--run-dir", run, status=2)
    assert (run / "metrics.jsonl").read_bytes() == before
