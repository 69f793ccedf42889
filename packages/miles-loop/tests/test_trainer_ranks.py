"""Several trainer ranks in a real run: the same training, and a rank that is lost costs a detour."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from loop_toy.harness import Command, children, records, wait_for, wait_for_records, without_clock
from loop_toy.recipe import RECIPE

from miles_contracts import InvalidFieldError
from miles_loop.arguments import config_for, parse

PATIENCE_S = 240
"""For what takes some ten seconds on a quiet machine."""


def rank_process(run: Path, driver: int, name: str) -> int:
    """The child of the driver that writes the log of this name."""
    log = str((run / "logs" / f"{name}.log").resolve())
    return next(pid for pid in children(driver) if os.path.realpath(f"/proc/{pid}/fd/1") == log)


def lose(process: subprocess.Popen[str], run: Path, number: signal.Signals, name: str = "trainer-1") -> None:
    """Kill or stop a rank, and wait until the run has gone back and on."""
    log = run / "logs" / "driver.log"
    before = log.read_text().count("going back to")
    os.kill(rank_process(run, process.pid, name), number)
    wait_for(lambda: log.read_text().count("going back to") > before, PATIENCE_S)
    done = len(records(run))
    wait_for_records(process, run, done + 2, PATIENCE_S)


def interrupted(process: subprocess.Popen[str], run: Path) -> int:
    """End a run in order; how often its trainer was started again."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    return int(json.loads((run / "status.json").read_text())["counters"]["trainer_restarts"])


def test_two_ranks_train_as_one_does(toy: Command, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    options = ("--plain", "--steps", 2, "--pipeline-depth", 0, "--trainer.batching.max_tokens", 64)
    toy.run("train", "--run-dir", two, *options, "--trainer.ranks", 2)
    toy.run("train", "--run-dir", one, *options)
    ours, theirs = without_clock(records(two)), without_clock(records(one))
    assert ours[0] == theirs[0]
    # the first step was sampled with the same weights
    assert ours[1].keys() == theirs[1].keys()
    for key, value in theirs[1].items():
        if key not in ("train/micro_batches", "train/tokens_fed"):
            assert ours[1][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    for record in records(two)[1:]:
        assert record["rollout/token_mismatches"] == 0
        assert record["rollout/tokens_trained"] > 0
        assert record["perf/reduce_s"] > 0
    assert "perf/reduce_s" not in records(one)[1]


def test_two_ranks_write_into_the_memory_of_two_engines(toy: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 3, "--pipeline-depth", 0, "--trainer.ranks", 2, "--engine.replicas", 2)
    toy.run("train", "--run-dir", run, *options, "--sync.transport", "peer", "--sync.canary", "agree")
    found = records(run)
    assert found[-1]["step"] == 3
    for record in found[1:]:
        assert record["rollout/token_mismatches"] == 0
        assert record["rollout/tokens_trained"] > 0
        # what was sampled was sampled with the trainer's weights
        assert record["train/train_rollout_logprob_abs_diff_max"] < 1e-3
    log = (run / "logs" / "driver.log").read_text()
    assert "trying again" not in log


@pytest.mark.timeout(900)
def test_a_killed_rank_costs_a_detour_and_one_rank_can_go_on(toy: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--checkpoint-every", 1, "--trainer.ranks", 2)
    process = toy.start("train", "--run-dir", run, *options)
    wait_for_records(process, run, 3, PATIENCE_S)
    lose(process, run, signal.SIGKILL)
    assert "process trainer-1 was killed by SIGKILL" in (run / "logs" / "driver.log").read_text()
    assert interrupted(process, run) == 1
    steps = [record["step"] for record in records(run)]
    assert steps == list(range(len(steps))), "no step is missing, none is there twice"
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained))
    toy.run("train", "--resume", run, "--plain", "--steps", steps[-1] + 2, "--trainer.ranks", 1)
    assert records(run)[-1]["step"] == steps[-1] + 2
    assert all(record["rollout/token_mismatches"] == 0 for record in records(run)[1:])


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_ranks_that_send_together_and_are_killed_again_and_again_cost_a_detour_each(
    toy: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--checkpoint-every", 1, "--trainer.ranks", 2, "--engine.replicas", 2)
    more = ("--sync.transport", "peer", "--runtime.trainer_restarts", 4)
    process = toy.start("train", "--run-dir", run, *options, *more)
    wait_for_records(process, run, 3, PATIENCE_S)
    for name in ("trainer-1", "trainer", "trainer-1"):
        lose(process, run, signal.SIGKILL, name)
    assert interrupted(process, run) == 3
    steps = [record["step"] for record in records(run)]
    assert steps == list(range(len(steps)))
    assert all(record["rollout/token_mismatches"] == 0 for record in records(run)[1:])


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_a_rank_that_hangs_and_the_loss_of_the_first_cost_a_detour_each(toy: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--checkpoint-every", 1, "--runtime.trainer_rank_timeout_s", 15)
    more = ("--trainer.ranks", 3, "--runtime.trainer_restarts", 2)
    process = toy.start("train", "--run-dir", run, *options, *more)
    wait_for_records(process, run, 3, PATIENCE_S)
    lose(process, run, signal.SIGSTOP)
    log = (run / "logs" / "driver.log").read_text()
    assert "did not come within 15 s" in log or "trainer rank 1 gave no answer within 15 s" in log
    lose(process, run, signal.SIGKILL, "trainer")
    log = (run / "logs" / "driver.log").read_text()
    assert "process trainer was killed by SIGKILL" in log
    assert "process trainer-1 ended" not in log
    assert interrupted(process, run) == 2


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_ranks_that_are_lost_too_often_end_the_run_by_name(toy: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 100000, "--checkpoint-every", 1, "--runtime.trainer_restarts", 0)
    process = toy.start("train", "--run-dir", run, *options, "--trainer.ranks", 2)
    wait_for_records(process, run, 3, PATIENCE_S)
    os.kill(rank_process(run, process.pid, "trainer-1"), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "process_died")
    assert "process trainer-1 was killed by SIGKILL" in err


def test_ranks_cannot_share_a_gpu() -> None:
    with pytest.raises(InvalidFieldError, match=r"2 trainer ranks cannot share cuda:0; use cuda"):
        config_for(RECIPE, parse(["--trainer.ranks", "2", "--trainer.device", "cuda:0"], ()))
    ray = config_for(RECIPE, parse(["--trainer.ranks", "2", "--trainer.device", "cuda:0", "--runtime", "ray"], ()))
    assert ray.runtime.trainer_ranks == 2
