"""The recipe's models trained by two ranks: every token and every expert route is the one that was sampled."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, descendants, records, wait_for


def test_two_ranks_train_a_mixture_on_the_routes_of_its_engine(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--hardware", "cpu", "--model", "moe", "--trainer.ranks", 2, "--steps", 3)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, "--pipeline-depth", 0, *SMALL)
    found = records(run)
    assert found[-1]["step"] == 3
    for record in found[1:]:
        assert record["rollout/token_mismatches"] == record["rollout/route_mismatches"] == 0
        assert record["train/replayed_fraction"] == 1
        assert record["train/trajectories"] == 8
        # trainer and engine compute the same, on either rank
        assert record["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0, abs=1e-3)
        assert record["perf/reduce_s"] > 0
    assert (run / "logs" / "trainer-1.log").exists()


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_two_ranks_learn_as_one_does(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--hardware", "cpu", "--run-dir", run, "--trainer.ranks", 2, timeout=880)
    report = shell.run_json("miles", "report", run, "--json")
    # The bounds that runs with one rank are held to.
    assert report["eval_first"] <= 0.05
    assert report["eval_last"] >= report["eval_first"] + 0.3
    assert report["token_mismatches"] == 0


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_two_ranks_write_into_engines_one_of_which_dies(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--trainer.ranks", 2, "--engine.replicas", 2, "--sync.transport", "peer", "--sync.canary", "agree")
    more = ("--hardware", "cpu", "--model", "moe", "--steps", 10)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *more, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    engines = [pid for pid, line in descendants(process.pid).items() if "miles_loop.engine_process" in line]
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    found = records(run)
    assert [record["step"] for record in found] == list(range(11))
    for record in found[1:]:
        assert record["rollout/token_mismatches"] == record["rollout/route_mismatches"] == 0
    status = json.loads((run / "status.json").read_text())
    assert status["counters"]["engine_restarts"] >= 1
    assert status["counters"]["trainer_restarts"] == 0, "an engine that dies costs the ranks nothing"
