"""A killed run loses no prompt and trains none twice; at depth 0 nobody can tell that it was killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from loop_toy.harness import (
    Command,
    alive,
    children,
    named_child,
    records,
    wait_for,
    wait_for_records,
    without_clock,
)

from miles_loop.checkpoint import newest_checkpoint, read_checkpoint

STEPS = 8


def kill_after(command: Command, run: Path, lines: int, delay: float, *options: object, first: bool) -> list[int]:
    """Start (or resume) a run and kill its driver `delay` after it has `lines` records; returns its children."""
    where = ("--run-dir", run) if first else ("--resume", run)
    process = command.start("train", *where, "--plain", *options, FAKE_STEP_S="0.05")
    wait_for_records(process, run, lines)
    started = children(process.pid)
    time.sleep(delay)
    process.kill()
    process.wait()
    return started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at depth 0 that nobody disturbs."""
    scratch = tmp_path_factory.mktemp("whole")
    run = scratch / "run"
    Command("loop_toy.fast", scratch).run(
        *("train", "--run-dir", run, "--plain", "--steps", STEPS, "--pipeline-depth", 0, "--checkpoint-every", 2)
    )
    return run


def test_depth_0_resumes_bit_for_bit(fast: Command, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "killed"
    options = ("--steps", STEPS, "--pipeline-depth", 0, "--checkpoint-every", 2)
    for number, (lines, delay) in enumerate([(1, 0.0), (4, 0.01), (6, 0.07)]):
        started = kill_after(fast, run, lines, delay, *(options if number == 0 else ()), first=number == 0)
        assert len(started) == 2
        wait_for(lambda started=started: not any(alive(child) for child in started), 10)
    fast.run("train", "--resume", run, "--plain")
    assert without_clock(records(run)) == without_clock(records(whole))
    assert records(run, "ledger.jsonl") == records(whole, "ledger.jsonl")


def test_a_graceful_stop_resumes_bit_for_bit(fast: Command, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "stopped"
    process = fast.start("train", "--run-dir", run, "--plain", "--steps", STEPS, "--pipeline-depth", 0)
    wait_for_records(process, run, 3)
    process.terminate()
    assert process.wait(30) == 130
    assert 2 <= records(run)[-1]["step"] < STEPS
    fast.run("train", "--resume", run, "--plain")
    assert without_clock(records(run)) == without_clock(records(whole))


@pytest.mark.parametrize("seed", range(2))
def test_asynchronous_resume_loses_no_prompt_and_trains_none_twice(fast: Command, tmp_path: Path, seed: int) -> None:
    run = tmp_path / "async"
    draw = random.Random(seed)
    options = ("--steps", 12, "--pipeline-depth", 2, "--checkpoint-every", 2, "--evaluation.every", 3)
    for number in range(2):
        lines = 2 + 4 * number + draw.randrange(3)
        kill_after(fast, run, lines, draw.random() * 0.1, *(options if number == 0 else ()), first=number == 0)
    fast.run("train", "--resume", run, "--plain")

    assert [r["step"] for r in records(run)] == list(range(13))
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained)) == 24
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    rollout = read_checkpoint(checkpoint).rollout
    waiting = {issue.prompt_index for issue in rollout.again}
    waiting |= {entry.group.prompt_index for entry in rollout.entries}
    assert not waiting & set(trained)
    assert waiting | set(trained) == set(range(rollout.source["next"]))
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in records(run))


@pytest.mark.parametrize("victim", ["driver", "trainer"])
def test_by_prompt_a_killed_run_trains_the_same_sequence(fast: Command, tmp_path: Path, victim: str) -> None:
    run, whole = tmp_path / "killed", tmp_path / "whole"
    options = ("--plain", "--steps", 10, "--pipeline-depth", 2, "--checkpoint-every", 2, "--rollout.order", "prompt")
    options += ("--task.reward", "loop_toy.scores:uneven", "--task.eval_reward", "loop_toy.recipe:vowels")
    options += ("--rollout.max_attempts", 2)
    fast.run("train", "--run-dir", whole, *options)
    process = fast.start("train", "--run-dir", run, *options, FAKE_STEP_S="0.2")
    wait_for_records(process, run, 5)
    if victim == "driver":
        process.kill()
        process.wait()
        fast.run("train", "--resume", run, "--plain")
    else:
        os.kill(named_child(process.pid, "loop_toy.trainer"), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert "going back to" in out
    ledger = records(run, "ledger.jsonl")
    assert [prompt for entry in ledger for prompt, _ in entry["prompts"]] == [i for i in range(25) if i % 5 != 2]
    assert ledger == records(whole, "ledger.jsonl")


def test_steps_may_be_added_and_the_stream_goes_on(fast: Command, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "longer"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 5, "--pipeline-depth", 0, "--evaluation.at_end", "false")
    fast.run("train", "--resume", run, "--plain", "--steps", STEPS, "--evaluation.at_end", "true")
    assert without_clock(records(run)) == without_clock(records(whole))


def test_a_finished_run_needs_more_steps(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "done"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 2)
    assert "the run has done 2; ask for more with --steps" in fast.run("train", "--resume", run, status=2)


def test_what_makes_the_run_cannot_change(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "fixed"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 2)
    out = fast.run("train", "--resume", run, "--steps", 4, "--seed", 7, status=2)
    assert "seed: got '7'; a resumed run keeps this" in out


def test_without_a_checkpoint_it_starts_again_and_keeps_the_old_records(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "lost"
    kill_after(fast, run, 4, 0.0, "--steps", 6, "--pipeline-depth", 0, first=True)
    old = records(run)
    lost = old[-1]["step"]
    assert lost >= 3
    out = fast.run("train", "--resume", run, "--steps", lost - 1, status=2)
    assert f"the run has done {lost}; ask for more with --steps" in out
    out = fast.run("train", "--resume", run, "--steps", 7, "--task", "sums", status=2)
    assert "a resumed run keeps this" in out
    assert records(run) == old, "what is refused changes nothing"
    out = fast.run("train", "--resume", run, "--plain")
    said = f"no checkpoint in {run}: the run starts again from step 0; the records of the {lost} steps that are lost"
    assert said in out
    assert said in (run / "logs" / "driver.log").read_text()
    (kept,) = run.glob("lost-*")
    assert records(kept) == old
    assert [entry["step"] for entry in records(kept, "ledger.jsonl")][: lost - 1] == list(range(1, lost))
    assert [r["step"] for r in records(run)] == list(range(7))
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained)) == 12


def test_a_run_that_was_killed_before_its_first_step_says_nothing_of_losses(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "early"
    process = fast.start("train", "--run-dir", run, "--plain", "--steps", 1, FAKE_STEP_S="60")
    wait_for_records(process, run, 1)
    process.kill()
    process.wait()
    assert "no checkpoint" not in fast.run("train", "--resume", run, "--plain")
    assert not list(run.glob("lost-*"))


def test_a_damaged_checkpoint_is_named(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "damaged"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 2)
    model = run / "checkpoints" / "step_000002" / "hf" / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    out = fast.run("train", "--resume", run, "--steps", 4, status=1)
    assert str(model) in out
    assert "is not what was written" in out


def test_two_processes_cannot_run_in_one_folder(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "shared"
    process = fast.start("train", "--run-dir", run, "--plain", "--steps", 500)
    wait_for_records(process, run, 2)
    assert "another process runs in this folder" in fast.run("train", "--resume", run, status=2)
    process.kill()
