"""Trainer ranks on two nodes of a Ray cluster: one bundle each, the training of one machine, and losses survived."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from ray_cluster import TwoNodes, eventually, gone, leader, raylet_of
from recipe_runs import SMALL, Shell, records, wait_for, without_clock

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

# A node has 4 CPUs: two ranks do not fit on one.
APART = ("--trainer.ranks", 2, "--runtime.ray.trainer_cpus", 2.1, "--runtime.ray.rollout_cpus", 0.5)


def on(cluster: TwoNodes) -> tuple[object, ...]:
    """Options of a run on the cluster."""
    return ("--runtime", "ray", "--address", cluster.address, *APART)


def logs(run: Path) -> list[Path]:
    """Of both ranks."""
    return [run / "logs" / name for name in ("trainer.log", "trainer-1.log")]


def test_ranks_on_two_nodes_train_as_on_one_machine_and_one_that_is_killed_costs_a_detour(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    there, here = tmp_path / "ray", tmp_path / "local"
    options = ("--pipeline-depth", 0, "--checkpoint-every", 2, *SMALL)
    peers = ("--sync.transport", "peer")  # both ranks write into the engine, one of them from another node
    process = shell.start("miles-qwen3", "train", "--run-dir", there, "--steps", 6, *options, *on(cluster), *peers)
    wait_for(lambda: len(records(there)) >= 4, process)
    assert len({raylet_of(log) for log in logs(there)}) == 2, "a rank on each node"
    os.kill(leader(logs(there)[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert gone(there)
    log = (there / "logs" / "driver.log").read_text()
    assert "process trainer-1 was killed by SIGKILL" in log
    assert "going back to" in log
    shell.run("miles-qwen3", "train", "--run-dir", here, "--steps", 6, *options, "--trainer.ranks", 2)
    # The detour cannot be seen afterwards, and nor can the cluster.
    assert without_clock(records(there)) == without_clock(records(here))
    final = "checkpoints/step_000006/hf/model.safetensors"
    assert (there / final).read_bytes() == (here / final).read_bytes()
    assert all(record["rollout/token_mismatches"] == 0 for record in records(there)[1:])


@pytest.mark.gate
def test_a_rank_whose_node_is_lost_leaves_a_run_that_fewer_ranks_continue(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--steps", 4000, "--checkpoint-every", 1, "--runtime.ray.placement_timeout_s", 10, *on(cluster))
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    assert len({raylet_of(log) for log in logs(run)}) == 2
    cluster.lose_other()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "was lost with its node" in (run / "logs" / "driver.log").read_text()
    # It went back to its checkpoint by itself, and found that one node does not hold two ranks.
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "no_room")
    eventually(lambda: gone(run))
    done = status["step"]
    shell.run("miles-qwen3", "train", "--resume", run, "--trainer.ranks", 1, "--steps", done + 2)
    steps = [record["step"] for record in records(run)]
    assert steps == list(range(done + 3)), "no step is missing, none is there twice"
    assert all(record["rollout/token_mismatches"] == 0 for record in records(run)[1:])
