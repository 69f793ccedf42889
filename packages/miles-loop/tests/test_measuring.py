"""Evaluation beside training, by a program that is given snapshots: no point is lost in silence, none ends a run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from loop_toy.harness import Command, records, wait_for, wait_for_records

COMMON = ("--plain", "--evaluation.mode", "external", "--evaluation.every", 1, "--steps", 4)


def program(tmp_path: Path, body: str) -> tuple[object, ...]:
    """Options for a program with the variables `version` and `checkpoint`."""
    script = tmp_path / "measure.py"
    lines = ("import json, os, sys, time", "checkpoint, version = sys.argv[1], int(sys.argv[2])", body)
    script.write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(script), "{checkpoint}", "{version}"]
    return ("--evaluation.command", json.dumps(command))


def points(run: Path) -> dict[int, dict[str, Any]]:
    """The records of evaluations by the version they are of."""
    found = [r for r in records(run) if any(key.startswith("eval/") for key in r)]
    assert len({r["step"] for r in found}) == len(found), "one record for a version"
    return {r["step"]: r for r in found}


def test_every_version_is_measured_from_its_own_snapshot(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    body = """
state = json.load(open(checkpoint + "/trainer.json"))
print("some text first")
print(json.dumps({"toy/reward": state["version"] / 10, "snapshots": len(os.listdir(os.path.dirname(checkpoint)))}))
"""
    fast.run("train", "--run-dir", run, *COMMON, *program(tmp_path, body))
    found = points(run)
    assert sorted(found) == [0, 1, 2, 3, 4]
    for version, record in found.items():
        assert record["eval/version"] == version
        assert record["eval/toy/reward"] == version / 10
        assert 0 <= record["eval/lag_steps"] <= 4 - version
        assert record["eval/export_time_seconds"] > 0
        assert record["eval/snapshots"] <= 2, "what is outstanding is bounded, and what was measured is gone"
    assert not (run / "snapshots").exists()
    report = json.loads((run / "summary.json").read_text())
    assert [(e["step"], e["toy"]) for e in report["evaluations"]] == [(v, v / 10) for v in range(5)]
    assert (report["eval_first"], report["eval_last"]) == (0.0, 0.4)


def test_one_that_crashes_is_a_skipped_point_with_its_reason(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    body = """
if version == 1:
    sys.exit("the harness is broken")
if version == 2:
    print("no numbers")
else:
    print(json.dumps({"toy/reward": 1.0}))
"""
    out = fast.run("train", "--run-dir", run, *COMMON, *program(tmp_path, body))
    found = points(run)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert found[1]["eval/skipped_crashed"] == found[2]["eval/skipped_crashed"] == 1
    assert "the harness is broken" in found[1]["eval/skipped_reason"]
    assert "the harness is broken" in out
    assert "no object of numbers" in found[2]["eval/skipped_reason"]
    assert json.loads((run / "summary.json").read_text())["evaluations_skipped"] == 2
    assert not (run / "snapshots").exists()


def test_skip_leaves_out_what_would_hold_training_up(fast: Command, tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    body = f"""
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
print(json.dumps({{"toy/reward": 1.0}}))
"""
    options = (*COMMON, "--evaluation.max_outstanding", 1, "--evaluation.overflow", "skip")
    process = fast.start(
        "train", "--run-dir", run, *options, "--evaluation.keep_snapshots", 1, *program(tmp_path, body)
    )
    # Version 0 is being measured all the time; training goes on to the last step, whose weights are always measured.
    wait_for(lambda: any(r["step"] == 3 and "train/loss" in r for r in records(run)))
    go.touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    lines = [r for r in records(run) if any(key.startswith("eval/") for key in r)]
    assert [r["step"] for r in lines if "eval/toy/reward" in r] == [0, 4]
    assert [r["step"] for r in lines if "eval/skipped_busy" in r] == [1, 2, 3]
    assert [r["eval/lag_steps"] for r in lines if "eval/toy/reward" in r] == [4, 0]
    assert [p.name for p in (run / "snapshots").iterdir()] == ["version-00000004"]


def test_backpressure_holds_training_up_until_there_is_room(fast: Command, tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    body = f"""
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
print(json.dumps({{"toy/reward": 1.0}}))
"""
    process = fast.start("train", "--run-dir", run, *COMMON, *program(tmp_path, body))
    # Versions 0 and 1 are outstanding: step 2 waits for room before it is recorded.
    wait_for_records(process, run, 1)
    wait_for(lambda: (run / "snapshots/version-00000001").exists())
    time.sleep(1)  # time to go on, if it did
    assert max(r["step"] for r in records(run)) <= 1
    go.touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert sorted(points(run)) == [0, 1, 2, 3, 4]


def test_a_killed_run_measures_again_what_was_not_finished(fast: Command, tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    body = f"""
while version == 2 and not os.path.exists({str(go)!r}):
    time.sleep(0.01)
print(json.dumps({{"toy/reward": version / 10}}))
"""
    options = ("--plain", "--evaluation.mode", "external", "--evaluation.every", 2, "--steps", 4)
    options += ("--checkpoint-every", 2, "--evaluation.max_outstanding", 1)  # step 4 waits for version 2
    process = fast.start("train", "--run-dir", run, *options, *program(tmp_path, body))
    wait_for_records(process, run, 4)
    process.kill()
    process.communicate()
    assert 2 not in points(run)
    go.touch()
    fast.run("train", "--resume", run, "--plain")
    assert {v: r["eval/toy/reward"] for v, r in points(run).items()} == {0: 0.0, 2: 0.2, 4: 0.4}
    assert not (run / "snapshots").exists()


def test_on_the_shared_engines_a_failure_is_a_skipped_point_too(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--plain", "--steps", 2, "--evaluation.every", 1, "--task.eval_reward", "loop_toy.recipe:raising")
    fast.run("train", "--run-dir", run, *options)
    found = records(run)
    assert [r["step"] for r in found] == [0, 1, 2]
    assert all(r["eval/skipped_failed"] == 1 for r in found)
    assert all("not one answer could be scored" in r["eval/skipped_reason"] for r in found)
    assert json.loads((run / "summary.json").read_text())["evaluations_skipped"] == 3
