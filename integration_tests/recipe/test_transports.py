"""The recipe with every transport: engines in processes of their own, one of them killed, every token audited."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, descendants, records, wait_for

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("transport", ["local", "broadcast", "peer", "disk"])
def test_a_run_survives_the_death_of_an_engine_with_every_transport(
    shell: Shell, tmp_path: Path, transport: str
) -> None:
    run = tmp_path / "run"
    options = ("--engine.replicas", 2, "--sync.transport", transport, "--sync.canary", "agree", "--steps", 12)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    module = "miles_loop.engine_process" if transport == "peer" else "miles_rollout.engine"
    engines = [pid for pid, line in descendants(process.pid).items() if module in line]
    assert engines
    os.kill(engines[0], signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    assert [record["step"] for record in records(run) if record["step"]] == list(range(1, 13))
    report = shell.run_json("miles", "report", run, "--json")
    assert report["token_mismatches"] == 0
    assert report["tokens_trained"] > 0
    versions = [record["rollout/fully_async/max_staleness"] for record in records(run) if record["step"]]
    assert max(versions) <= 2
