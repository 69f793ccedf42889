"""Whole runs with SGLang as the engine: started by the run, or attached; weights by broadcast, tokens audited."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, descendants, records
from server import STUBS, embedded_engine, sglang_python, sglang_server

from miles_contracts import SamplingParams
from miles_qwen3.model import build_tiny
from miles_rollout.engine_client import EngineClient

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def train(run: Path, *options: object) -> list[object]:
    """A command line that starts SGLang in its own environment."""
    engine = ["--rollout.engine", "sglang", "--engine.python", sglang_python()]
    engine += ["--engine.environment.PYTHONPATH", str(STUBS)]
    return ["miles-qwen3", "train", "--hardware", "cpu", *engine, "--run-dir", run, *options]


def report_of(shell: Shell, run: Path) -> dict[str, object]:
    found: dict[str, object] = shell.run_json("miles", "report", run, "--json")
    return found


def test_a_game_of_several_turns_is_learnt_with_sglang(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell.run(*train(run, "--task", "guess", "--steps", 50), timeout=1700)
    report = report_of(shell, run)
    assert (report["status"], report["steps"]) == ("finished", 50)
    # 0.00 -> 0.35 after 40 steps; without seeds in the engine, no two runs are alike
    assert report["eval_last"] >= report["eval_first"] + 0.15
    assert report["reward_last"] > 2 * report["reward_first"]
    assert report["token_mismatches"] == 0
    found = records(run)[1:]
    assert any(r["rollout/fully_async/max_staleness"] > 0 for r in found), "rollout never ran ahead"
    for record in found:
        # SGLang and the trainer say the same of the same weights, up to rounding of float32
        if record["rollout/fully_async/max_staleness"] == 0:
            assert record["train/train_rollout_logprob_abs_diff"] < 1e-4
    config = (run / "config.toml").read_text()
    assert 'kind = "sglang"' in config
    assert 'transport = "broadcast"' in config
    assert "out of service" not in (run / "logs" / "driver.log").read_text()


@pytest.mark.parametrize("transport", ["broadcast", "local"])
def test_a_mixture_replays_the_experts_of_an_sglang_that_is_killed(
    shell: Shell, tmp_path: Path, transport: str
) -> None:
    run = tmp_path / "run"
    process = shell.start(*train(run, "--model", "moe", "--steps", 8, "--sync.transport", transport, *SMALL))
    while len(records(run)) < 3:  # SGLang takes its time to start: the test's own time limit is the only one
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    (scheduler, *_) = [pid for pid, line in descendants(process.pid).items() if "sglang::scheduler" in line]
    os.kill(scheduler, signal.SIGKILL)
    out, err = process.communicate(timeout=1700)
    assert process.returncode == 0, out + err
    report = report_of(shell, run)
    assert (report["status"], report["steps"], report["engine_restarts"]) == ("finished", 8, 1)
    assert (report["token_mismatches"], report["route_mismatches"]) == (0, 0)
    assert report["routes_audited"] > report["tokens_trained"]
    for record in records(run)[1:]:
        if record["rollout/fully_async/max_staleness"] == 0:
            assert record["train/router_agreement"] > 0.999


async def test_engines_that_somebody_else_started(shell: Shell, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    build_tiny(model, 5)
    with (
        sglang_server(model, tmp_path / "sglang.log", "--weight-version", "0") as theirs,
        embedded_engine(model, tmp_path / "embedded.log") as ours,
    ):

        def start(run: Path, *more: object) -> list[object]:
            attached = ["--rollout.engines", theirs, ours, "--model", model, "--run-dir", run, "--steps", 4]
            return ["miles-qwen3", "train", "--hardware", "cpu", *attached, *SMALL, *more]

        # one opens the files of a bucket and the other the same memory by handle
        shell.run(*start(tmp_path / "run"), timeout=1700)
        assert 'transport = "local"' in (tmp_path / "run" / "config.toml").read_text()
        report = report_of(shell, tmp_path / "run")
        assert (report["status"], report["steps"], report["token_mismatches"]) == ("finished", 4, 0)
        assert report["engine_restarts"] == 0
        for record in records(tmp_path / "run")[1:]:
            assert record["perf/update_weights_not_compared"] == 0 < record["perf/update_weights_compared"]
        async with EngineClient(theirs) as sglang, EngineClient(ours) as embedded:
            assert await sglang.weight_version() == await embedded.weight_version() == 4
            params = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
            answers = [(await e.generate([5, 6, 7], params)).output_ids.tolist() for e in (sglang, embedded)]
        assert answers[0] == answers[1], "the engines serve different weights"
