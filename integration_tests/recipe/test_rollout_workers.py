"""Real runs whose answers are made by rollout workers: the same run, a game played in them, and one of them killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, alive, descendants, records, wait_for, without_clock


def worker(pid: int, index: int) -> int:
    """Process id of a rollout worker below a driver, without its guard."""
    found = [child for child, command in descendants(pid).items() if "rollout_process" in command]
    return sorted(child for child in found if os.getpgid(child) == child)[index]


@pytest.mark.gate
def test_at_depth_0_one_worker_makes_the_very_same_run(shell: Shell, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    options = ("--steps", 3, "--pipeline-depth", 0, "--engine.replicas", 2, "--evaluation.every", 2, *SMALL)
    shell.run("miles-qwen3", "train", "--run-dir", here, *options)
    shell.run("miles-qwen3", "train", "--run-dir", there, *options, "--runtime.rollout-workers", 1)
    assert without_clock(records(there)) == without_clock(records(here))
    assert records(there, "ledger.jsonl") == records(here, "ledger.jsonl")
    weights = "checkpoints/step_000003/hf/model.safetensors"
    assert (there / weights).read_bytes() == (here / weights).read_bytes()


def test_a_game_goes_on_when_a_worker_is_killed(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "guess", "--steps", 4000, "--runtime.rollout-workers", 2)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    killed, other = worker(process.pid, 0), worker(process.pid, 1)
    os.kill(killed, signal.SIGKILL)
    log = run / "logs" / "driver.log"
    wait_for(lambda: re.search(r"rollout worker rollout-\d is back", log.read_text()), process)
    assert alive(other)
    done = len(records(run))
    wait_for(lambda: len(records(run)) >= done + 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    found = [record for record in records(run) if record["step"] > 0]
    assert all(record["rollout/token_mismatches"] == 0 for record in found)
    assert all(record["rollout/session/mismatches"] == 0 for record in found)
    assert sum(record["rollout/session/turns"] for record in found) > len(found)
    assert sum(record["router/rollout_worker_restarts"] for record in found) == 1
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained))
    logs = [(run / "logs" / f"rollout-{index}.log").read_text() for index in range(2)]
    assert all("Traceback" not in text for text in logs), logs


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_it_learns_as_without_workers(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell.run(
        *("miles-qwen3", "train", "--hardware", "cpu", "--run-dir", run, "--runtime.rollout-workers", 2), timeout=880
    )
    report = shell.run_json("miles", "report", run, "--json")
    # The bounds that other runs are held to.
    assert report["eval_first"] <= 0.05
    assert report["eval_last"] >= report["eval_first"] + 0.3
    assert report["token_mismatches"] == 0
