"""A run on a Ray cluster of two nodes is the run that one machine does."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_cluster import TwoNodes, gone, raylet_of
from recipe_runs import SMALL, Shell, records, wait_for, without_clock

pytestmark = pytest.mark.ray


def test_at_depth_0_it_cannot_be_told_from_a_local_run(cluster: TwoNodes, shell: Shell, tmp_path: Path) -> None:
    there, here = tmp_path / "ray", tmp_path / "local"
    options = ("--steps", 5, "--pipeline-depth", 0, "--engine.replicas", 2, "--evaluation.every", 2, *SMALL)
    process = shell.start("miles-qwen3", "train", "--run-dir", there, *options, *cluster.options)
    wait_for(lambda: records(there), process)
    engines = {raylet_of(there / "logs" / f"engine-{i}.log") for i in range(2)}
    trainer = raylet_of(there / "logs" / "trainer.log")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert len(engines | {trainer}) == 2, "both nodes work"
    shell.run("miles-qwen3", "train", "--run-dir", here, *options)
    assert without_clock(records(there)) == without_clock(records(here))
    assert records(there, "ledger.jsonl") == records(here, "ledger.jsonl")
    final = "checkpoints/step_000005/hf/model.safetensors"
    assert (there / final).read_bytes() == (here / final).read_bytes()
    assert gone(there)
