"""Held-out tasks measured on engines of their own, beside training: exactly the snapshot, whatever happens to them."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import SMALL, Shell, alive, descendants, records, start_engine, wait_for

from miles_qwen3.model import build_tiny

DEDICATED = ("--evaluation.mode", "dedicated", "--evaluation.every", 2, "--evaluation.samples", 4)
DEDICATED += ("--evaluation.ks", "1,2,4", "--evaluation.keep_snapshots", 1, "--pipeline-depth", 2)


def points(run: Path) -> dict[int, dict[str, Any]]:
    """The records of evaluations by version: measured exactly there, or skipped."""
    found = {r["step"]: r for r in records(run) if "eval/version" in r or "eval/skipped_reason" in r}
    last = max(found)
    for version, record in found.items():
        if "eval/skipped_reason" in record:
            continue
        assert record["eval/version"] == record["eval/sort/weight_version/mean"] == version
        assert record["eval/sort/weight_version/mixed_version_ratio"] == 0
        assert 0 <= record["eval/lag_steps"] <= last - version
        assert record["eval/export_time_seconds"] > 0
        assert {f"eval/sort/{name}@{k}" for name in ("pass", "mean") for k in (1, 2, 4)} <= record.keys()
    return found


def test_dedicated_engines_measure_exactly_the_snapshots(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--run-dir", run, "--steps", 4, *DEDICATED, *SMALL)
    found = points(run)
    assert sorted(found) == [0, 2, 4]
    assert not any("eval/skipped_reason" in r for r in found.values())
    assert [p.name for p in (run / "snapshots").iterdir()] == ["version-00000004"]


JUDGE = """
import asyncio
import os

folder = os.path.dirname(__file__)
judged = 0


async def judge(task, response):
    global judged
    judged += 1
    if judged > 32 and not os.path.exists(f"{folder}/killed"):
        open(f"{folder}/waits", "w").close()
        while not os.path.exists(f"{folder}/killed"):
            await asyncio.sleep(0.01)
    return float(response == task.label)
"""
"""Holds up the second evaluation (the first has 8 prompts with 4 answers each) until the test has done its worst."""


@pytest.mark.timeout(600)
def test_an_engine_that_somebody_else_runs_measures_snapshots_and_may_die(shell: Shell, tmp_path: Path) -> None:
    """Its death in the middle of a measurement is one skipped point; when it is there again it measures the next."""
    (tmp_path / "judging.py").write_text(JUDGE)
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    build_tiny(model, 5)  # of another seed than the run's: only a snapshot makes it measure the run's weights
    url, engine = start_engine(shell, model)
    options = ("--evaluation.urls", url, "--task.eval_reward", "judging:judge", "--steps", 6, *DEDICATED, *SMALL)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options)
    wait_for((tmp_path / "waits").exists, process)
    engine.kill()
    engine.communicate()
    (tmp_path / "killed").touch()
    wait_for(lambda: any("eval/skipped_reason" in r for r in records(run)), process)
    again, engine = start_engine(shell, model, int(url.rpartition(":")[2]))
    assert again == url
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    found = points(run)
    assert sorted(found) == [0, 2, 4, 6]
    assert [version for version, r in found.items() if "eval/skipped_reason" in r] == [2]
    assert found[2]["eval/skipped_unhealthy"] == 1
    assert url in found[2]["eval/skipped_reason"]
    assert engine.poll() is None, "it is not the run's to end"
    with urllib.request.urlopen(f"{url}/get_weight_version", timeout=60) as answer:
        assert json.load(answer)["weight_version"] == "6"
    # Greedy answers depend on the weights alone: the checkpoint measured on engines of a run's own gives the same.
    measured = shell.run_json("miles-qwen3", "eval", "--run", run, "--json")
    for name in ("reward", "pass@4", "response_length_mean"):
        assert measured[f"eval/sort/{name}"] == found[6][f"eval/sort/{name}"]


@pytest.mark.gate
@pytest.mark.timeout(600)
def test_a_measurement_that_loses_its_engine_is_one_skipped_point(shell: Shell, tmp_path: Path) -> None:
    """The next one starts it again, and measures what another engine measures of the same weights."""
    run = tmp_path / "run"
    process = shell.start("miles-qwen3", "train", "--run-dir", run, "--steps", 8, *DEDICATED, *SMALL)
    wait_for(lambda: any("eval/sort/reward" in r for r in records(run)), process)
    engine = next(pid for pid, line in descendants(process.pid).items() if _is_evaluation_engine(run, pid, line))
    os.kill(engine, signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    found = points(run)
    assert sorted(found) == [0, 2, 4, 6, 8], "none is lost, not even one that could not be measured"
    skipped = [r["eval/skipped_reason"] for r in found.values() if "eval/skipped_reason" in r]
    assert len(skipped) <= 1
    assert all("was killed by SIGKILL" in reason for reason in skipped)
    # Greedy answers depend on the weights alone: the last checkpoint measured on other engines gives the same.
    again = shell.run_json("miles-qwen3", "eval", "--run", run, "--json")
    names = ("reward", "pass@1", "pass@4", "response_length_mean")
    assert {n: again[f"eval/sort/{n}"] for n in names} == {n: found[8][f"eval/sort/{n}"] for n in names}


def _is_evaluation_engine(run: Path, pid: int, line: str) -> bool:
    """The engine whose output goes to the evaluation engine's log."""
    if "miles_rollout.engine" not in line and "engine_process" not in line:
        return False
    return os.getpgid(pid) == pid and "evaluation-engine-0" in os.readlink(f"/proc/{pid}/fd/1")


def test_a_program_is_given_every_snapshot_as_a_model_folder(shell: Shell, tmp_path: Path) -> None:
    """It reads the weights, which differ from version to version, and tells what it found."""
    script = tmp_path / "measure.py"
    script.write_text(
        "import json, sys\n"
        "from safetensors.numpy import load_file\n"
        "from tokenizers import Tokenizer\n"
        "folder = sys.argv[1]\n"
        "weights = load_file(folder + '/model.safetensors')\n"
        "norm = float(sum((w.astype('float64') ** 2).sum() for w in weights.values()) ** 0.5)\n"
        "size = Tokenizer.from_file(folder + '/tokenizer.json').get_vocab_size()\n"
        "print(json.dumps({'norm/reward': norm, 'vocabulary': size}))\n"
    )
    run = tmp_path / "run"
    command = json.dumps(["python", str(script), "{checkpoint}"])
    options = ("--evaluation.mode", "external", "--evaluation.command", command, "--evaluation.every", 1, "--steps", 3)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    norms = {r["step"]: r["eval/norm/reward"] for r in records(run) if "eval/version" in r}
    assert sorted(norms) == [0, 1, 2, 3]
    assert len(set(norms.values())) == 4
    assert not (run / "snapshots").exists()


@pytest.mark.gate
def test_a_program_ends_with_a_driver_that_is_killed(shell: Shell, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 1000 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; wait; sleep 1000"
    command = json.dumps(["bash", "-c", script, "{checkpoint}"])
    options = ("--evaluation.mode", "external", "--evaluation.command", command, "--steps", 3)
    process = shell.start("miles-qwen3", "train", "--run-dir", tmp_path / "run", *options, *SMALL)
    wait_for(pids.exists, process)
    found = [int(word) for word in pids.read_text().split()]
    assert all(alive(pid) for pid in found)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in found))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--evaluation.mode", "external"), "evaluation.command"),
        (("--evaluation.mode", "external", "--evaluation.command", "measure.sh"), "{checkpoint}"),
        (("--evaluation.command", "measure.sh,{checkpoint}"), "evaluation.mode"),
        (("--evaluation.ks", "1,3", "--evaluation.samples", 2), "evaluation.samples"),
        (("--evaluation.mode", "elsewhere"), "elsewhere"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(shell: Shell, words: tuple[object, ...], said: str) -> None:
    out = shell.run("miles-qwen3", "train", *words, status=2)
    assert said in out
    assert "Traceback" not in out
