"""Actors, nodes and drivers are lost: a run goes on with the weights of now, or ends by name and can be continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from ray_cluster import TwoNodes, actor_of, eventually, gone, leader, raylet_of
from recipe_runs import SMALL, Shell, alive, descendants, records, wait_for

pytestmark = pytest.mark.ray


def started(shell: Shell, run: Path, *options: object) -> subprocess.Popen[str]:
    """A run that has done its second step."""
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    wait_for(lambda: len(records(run)) >= 3, process)
    return process


def said(run: Path, pattern: str) -> re.Match[str] | None:
    """The last time that the driver's log says something."""
    return next(reversed(list(re.finditer(pattern, (run / "logs" / "driver.log").read_text()))), None)


def test_a_killed_actor_is_replaced_and_a_killed_driver_leaves_nothing(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = started(shell, run, "--steps", 4000, *cluster.options)
    logs = [run / "logs" / f"{name}.log" for name in ("engine-0", "trainer", "rollout-0")]
    killed, engine = actor_of(logs[0]), leader(logs[0])
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: said(run, r"serves again, version \d+"), process)
    assert "was lost with its actor" in (run / "logs" / "driver.log").read_text()
    assert not alive(engine), "what the actor started ends with it"
    back = said(run, r"serves again, version (\d+)")
    assert back is not None
    wait_for(lambda: len(records(run)) >= int(back[1]) + 4, process)
    after = records(run)[int(back[1]) + 2 :]
    assert all(record["rollout/token_mismatches"] == 0 for record in after)
    # What is trained now was sampled by the new engine, with weights as new as the run's depth allows.
    assert all(record["rollout/fully_async/max_staleness"] <= 2 for record in after)

    maker, started_anew = leader(logs[2]), r"rollout worker rollout-0 is back"
    os.kill(actor_of(logs[2]), signal.SIGKILL)
    wait_for(lambda: said(run, started_anew), process)
    assert said(run, "rollout-0 was lost with its actor")
    assert not alive(maker)
    done = len(records(run))
    wait_for(lambda: len(records(run)) >= done + 3, process)
    assert all(record["rollout/token_mismatches"] == 0 for record in records(run)[1:])

    actors = [actor_of(log) for log in logs]
    assert killed not in actors
    process.kill()
    process.communicate()
    eventually(lambda: gone(run))
    eventually(lambda: not any(alive(pid) for pid in actors))


def test_an_engine_whose_node_is_lost_comes_back_on_another(cluster: TwoNodes, shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(shell, run, "--steps", 4000, *cluster.options)
    log = run / "logs" / "engine-0.log"
    lost = raylet_of(log)
    assert lost != raylet_of(run / "logs" / "trainer.log")
    cluster.lose_other()
    wait_for(lambda: said(run, r"serves again, version \d+"), process)
    assert "was lost with its node" in (run / "logs" / "driver.log").read_text()
    assert raylet_of(log) == raylet_of(run / "logs" / "trainer.log") != lost
    done = len(records(run))
    wait_for(lambda: len(records(run)) >= done + 2, process)
    # As `ray job stop` does it: the step is finished, a checkpoint is written, everything ends in order.
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    assert gone(run)
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["message"]) == ("interrupted", "stopped by SIGTERM")
    assert (run / "checkpoints" / f"step_{status['step']:06}").is_dir()
    assert all(record["rollout/token_mismatches"] == 0 for record in records(run)[1:])


@pytest.mark.gate
def test_a_rollout_worker_whose_node_is_lost_comes_back_on_another(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    where = ("--runtime.ray.placement", "spread", "--runtime.ray.rollout_cpus", 2, "--task", "guess")
    on_head = ("--runtime.ray.trainer_resources.head", 0.5, "--runtime.ray.engine_resources.head", 0.5)
    address = ("--runtime", "ray", "--address", cluster.address)
    process = started(shell, run, "--steps", 4000, *address, *where, *on_head)
    log = run / "logs" / "rollout-0.log"
    lost = raylet_of(log)
    assert lost != raylet_of(run / "logs" / "trainer.log") == raylet_of(run / "logs" / "engine-0.log")
    cluster.lose_other()
    wait_for(lambda: said(run, "rollout worker rollout-0 is back"), process)
    assert said(run, "rollout-0 was lost with its node")
    assert raylet_of(log) != lost
    done = len(records(run))
    wait_for(lambda: len(records(run)) >= done + 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    assert all(record["rollout/token_mismatches"] == 0 for record in records(run)[1:])
    assert gone(run)


@pytest.mark.gate
def test_a_run_whose_trainers_node_is_lost_ends_by_name_and_can_be_continued(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    where = ("--runtime.ray.placement", "spread", "--runtime.ray.engine_resources.head", 1)
    options = ("--runtime", "ray", "--address", cluster.address, "--runtime.trainer_restarts", 0, *where)
    process = started(shell, run, "--steps", 4000, "--checkpoint-every", 1, *options)
    assert raylet_of(run / "logs" / "engine-0.log") != raylet_of(run / "logs" / "trainer.log")
    cluster.lose_other()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    assert "process trainer was lost with its node" in err
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "process_died")
    assert gone(run)
    done = shell.run_json("miles", "report", run, "--json")["steps"]
    shell.run("miles-qwen3", "train", "--resume", run, "--steps", done + 2)
    assert records(run)[-1]["step"] == done + 2


@pytest.mark.gate
def test_a_run_whose_trainers_node_is_lost_goes_back_to_its_checkpoint_by_itself(
    cluster: TwoNodes, shell: Shell, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    where = ("--runtime.ray.placement", "spread", "--runtime.ray.engine_resources.head", 1)
    options = ("--runtime", "ray", "--address", cluster.address, *where)
    process = started(shell, run, "--steps", 4000, "--checkpoint-every", 1, *options)
    lost = raylet_of(run / "logs" / "trainer.log")
    cluster.lose_other()
    wait_for(lambda: said(run, r"going back to \S+step_\d+"), process)
    back = said(run, r"going back to \S+step_(\d+)")
    assert back is not None
    assert "trainer was lost with its node" in (run / "logs" / "driver.log").read_text()
    wait_for(lambda: records(run) and records(run)[-1]["step"] >= int(back[1]) + 2, process)
    assert raylet_of(run / "logs" / "trainer.log") != lost
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    steps = [record["step"] for record in records(run)]
    assert steps == list(range(len(steps))), "no step is missing, none is there twice"
    trained = [prompt for entry in records(run, "ledger.jsonl") for prompt, _ in entry["prompts"]]
    assert len(trained) == len(set(trained))
    assert gone(run)


@pytest.mark.gate
def test_a_cluster_that_a_run_started_for_itself_ends_with_it(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(shell, run, "--steps", 4000, "--runtime", "ray")
    below = descendants(process.pid)
    assert any("raylet" in command for command in below.values())
    process.kill()
    process.communicate()
    eventually(lambda: not any(alive(pid) for pid in below))
