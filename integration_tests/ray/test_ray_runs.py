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
    worker = raylet_of(there / "logs" / "rollout-0.log")  # placed as the others are; the local run has none
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert len(engines | {trainer, worker}) == 2, "both nodes work"
    shell.run("miles-qwen3", "train", "--run-dir", here, *options)
    assert without_clock(records(there)) == without_clock(records(here))
    assert records(there, "ledger.jsonl") == records(here, "ledger.jsonl")
    final = "checkpoints/step_000005/hf/model.safetensors"
    assert (there / final).read_bytes() == (here / final).read_bytes()
    assert gone(there)


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_it_learns_as_a_local_run_does(cluster: TwoNodes, shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--engine.replicas", 2, "--sync.transport", "broadcast", *cluster.options)
    shell.run("miles-qwen3", "train", "--hardware", "cpu", "--run-dir", run, *options, timeout=880)
    report = shell.run_json("miles", "report", run, "--json")
    # The bounds that local runs are held to.
    assert report["eval_first"] <= 0.05
    assert report["eval_last"] >= report["eval_first"] + 0.3
    assert report["token_mismatches"] == 0


@pytest.mark.gate
@pytest.mark.parametrize("transport", ["peer", "disk"])
def test_a_game_through_the_session_server_over_every_transport(
    cluster: TwoNodes, shell: Shell, tmp_path: Path, transport: str
) -> None:
    run = tmp_path / "run"
    options = ("--task", "guess", "--sync.transport", transport, "--steps", 3, *cluster.options)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    found = records(run)
    assert found[-1]["step"] == 3
    assert all(record["rollout/token_mismatches"] == 0 for record in found[1:])
    assert found[-1]["eval/guess/weight_version/mean"] == 3


@pytest.mark.gate
def test_a_run_is_measured_on_a_cluster_and_moves_to_one_machine(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--run-dir", run, "--steps", 2, *cluster.options, *SMALL)
    measured = shell.run_json("miles-qwen3", "eval", "--run", run, "--json")
    assert measured["eval/sort/reward"] == records(run)[-1]["eval/sort/reward"]
    assert not list(tmp_path.glob("miles-eval-*")), "nothing is left of the measurement"
    shell.run("miles-qwen3", "train", "--resume", run, "--runtime", "local", "--steps", 3)
    assert [record["step"] for record in records(run)] == [0, 1, 2, 3]
