"""A run that is killed, interrupted or robbed of its engine ends cleanly and loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, alive, descendants, records, wait_for, without_clock

UNEVEN = """
import asyncio
import random

from miles_qwen3.sorting import closeness


async def reward(task, response):
    if task.prompt_index % 4 == 1:
        raise RuntimeError("the judge cannot tell")
    await asyncio.sleep(random.random())
    return await closeness(task, response)
"""
"""Every fourth prompt always fails; the others take their time."""


def test_kill_and_resume_equals_an_uninterrupted_run_bit_for_bit(shell: Shell, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ("--steps", 6, "--pipeline-depth", 0, "--checkpoint-every", 2, *SMALL)
    shell.run("miles-qwen3", "train", "--run-dir", whole, *options)
    process = shell.start("miles-qwen3", "train", "--run-dir", killed, *options)
    wait_for(lambda: len(records(killed)) >= 4, process)
    below = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in below))
    shell.run("miles-qwen3", "train", "--resume", killed)
    assert without_clock(records(killed)) == without_clock(records(whole))
    final = "checkpoints/step_000006/hf/model.safetensors"
    assert (killed / final).read_bytes() == (whole / final).read_bytes()


def test_kill_and_resume_at_depth_1_trains_no_prompt_twice_and_loses_none(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--steps", 6, "--checkpoint-every", 2, *SMALL)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options)
    wait_for(lambda: len(records(run)) >= 4, process)
    process.kill()
    process.communicate()
    shell.run("miles-qwen3", "train", "--resume", run)
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained)) == 12


@pytest.mark.gate
@pytest.mark.timeout(600)
def test_by_prompt_the_sequence_survives_the_death_of_trainer_and_driver(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "user_code.py").write_text(UNEVEN)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ("--steps", 12, "--pipeline-depth", 2, "--checkpoint-every", 2, "--rollout.order", "prompt")
    options += ("--task.reward", "user_code:reward", "--task.eval_reward", "exact", "--rollout.max_attempts", 2)
    options += ("--engine.replicas", 2, *SMALL)
    shell.run("miles-qwen3", "train", "--run-dir", whole, *options)
    process = shell.start("miles-qwen3", "train", "--run-dir", killed, *options)
    wait_for(lambda: len(records(killed)) >= 4, process)
    trainer = next(pid for pid, line in descendants(process.pid).items() if "miles_loop.trainer_process" in line)
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: "going back to" in (killed / "logs" / "driver.log").read_text(), process)
    wait_for(lambda: records(killed)[-1]["step"] >= 6, process)
    below = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in below))
    shell.run("miles-qwen3", "train", "--resume", killed)
    ledger = records(killed, "ledger.jsonl")
    assert [prompt for entry in ledger for prompt, _ in entry["prompts"]] == [i for i in range(32) if i % 4 != 1]
    assert ledger == records(whole, "ledger.jsonl")
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in records(killed))


def test_interrupt_ends_all_processes_and_can_be_continued(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = shell.start("miles-qwen3", "train", "--run-dir", run, "--steps", 400, *SMALL)
    wait_for(lambda: len(records(run)) >= 2, process)
    below = descendants(process.pid)
    assert below
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert not any(alive(pid) for pid in below)
    done = records(run)[-1]["step"]
    shell.run("miles-qwen3", "train", "--resume", run, "--steps", done + 1)
    assert records(run)[-1]["step"] == done + 1


def test_a_killed_engine_is_replaced(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = shell.start("miles-qwen3", "train", "--run-dir", run, "--steps", 12, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    engine = next(pid for pid, line in descendants(process.pid).items() if "miles_rollout.engine" in line)
    os.kill(engine, signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert records(run)[-1]["step"] == 12
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in records(run))


@pytest.mark.parametrize("depth", [0, 1])
def test_no_shared_memory_is_left_behind(shell: Shell, tmp_path: Path, depth: int) -> None:
    buckets = tmp_path / "buckets"
    buckets.mkdir()
    options = ("--sync.directory", buckets, "--steps", 2, "--pipeline-depth", depth)
    shell.run("miles-qwen3", "train", "--run-dir", tmp_path / "run", *options, *SMALL)
    assert list(buckets.iterdir()) == []
