"""Trainer ranks on two nodes of a Ray cluster: one bundle each, the training of one machine, and losses survived."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ray_cluster import TwoNodes, eventually, gone, leader, raylet_of
from recipe_runs import SMALL, Shell, records, wait_for, without_clock

pytestmark = pytest.mark.ray

# A node has 4 CPUs: two ranks do not fit on one.
APART = ("--trainer.ranks", 2, "--runtime.ray.trainer_cpus", 2.5)


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
    process = shell.start("miles-qwen3", "train", "--run-dir", there, "--steps", 6, *options, *on(cluster))
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
def test_a_rank_whose_node_is_lost_is_placed_elsewhere_when_there_is_room(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--runtime", "ray", "--address", cluster.address, "--trainer.ranks", 2, "--checkpoint-every", 1)
    where = ("--runtime.ray.placement", "spread", "--runtime.ray.engine_resources.head", 1)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, "--steps", 4000, *options, *where, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    assert len({raylet_of(log) for log in logs(run)}) == 2
    cluster.lose_other()
    log = run / "logs" / "driver.log"
    wait_for(lambda: "going back to" in log.read_text(), process)
    done = len(records(run))
    wait_for(lambda: len(records(run)) >= done + 2, process)
    assert len({raylet_of(log) for log in logs(run)}) == 1
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    eventually(lambda: gone(run))
