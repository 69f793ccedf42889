"""A run whose turns go through SGLang's router to two engines; either may be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, descendants, records, wait_for

pytest.importorskip("sglang_router")
ROUTED = ("--engine.router", "sglang", "--engine.replicas", 2, *SMALL)


@pytest.mark.gate
def test_a_run_survives_the_death_of_an_engine_and_of_the_router(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = shell.start("miles-qwen3", "train", "--run-dir", run, "--steps", 100_000, *ROUTED)

    def kill(what: str) -> None:
        os.kill(next(pid for pid, line in descendants(process.pid).items() if what in line), signal.SIGKILL)

    def goes_on(after: str) -> None:
        wait_for(lambda: after in (run / "logs" / "driver.log").read_text(), process)
        done = len(records(run))
        wait_for(lambda: len(records(run)) >= done + 3, process)

    wait_for(lambda: len(records(run)) >= 3, process)
    kill("miles_rollout.engine")
    goes_on("serves again")
    kill("sglang::router")
    goes_on("sglang-router: router was killed")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    found = records(run)
    assert all(r.get("rollout/token_mismatches", 0) == 0 for r in found)
    assert all(r.get("rollout/failed_ratio", 0) == 0 for r in found)
    assert sum(r.get("router/reissued_turns", 0) for r in found) > 0
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained)) >= 18


def test_ray_and_sglangs_router_are_refused_together(shell: Shell, tmp_path: Path) -> None:
    out = shell.run(
        "miles-qwen3", "train", "--run-dir", tmp_path / "run", "--engine.router", "sglang", "--runtime", "ray", status=2
    )
    assert "engine.router: got 'sglang'; engines on Ray change their addresses; use own" in out
