"""Weights change while answers are being sampled: every token says which weights sampled it."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from recipe_runs import Shell, records, wait_for

from miles_contracts import Group, Status, wire


@pytest.mark.parametrize("mode", [pytest.param("retract", marks=pytest.mark.gate), "in_place"])
def test_answers_go_on_across_an_update(shell: Shell, tmp_path: Path, mode: str) -> None:
    """The update neither waits for them nor ends them."""
    (tmp_path / "my_reward.py").write_text("def score(task, response):\n    return float(len(response) % 7)\n")
    run = tmp_path / "run"
    options = ("--rollout.groups_per_step", 2, "--rollout.group_size", 4, "--rollout.filter", "none")
    options += ("--task.reward", "my_reward:score", "--rollout.sampling.max_new_tokens", 300, "--engine.replicas", 2)
    options += ("--evaluation.at_start", "false", "--sync.mode", mode, "--pipeline-depth", 3, "--steps", 100000)
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options)
    mixed = "rollout/weight_version/mixed_version_ratio"
    wait_for(lambda: sum(r.get(mixed, 0) > 0 for r in records(run)) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    found = [r for r in records(run) if r["step"]]
    assert all(r["rollout/token_mismatches"] == 0 for r in found)
    assert all(r["rollout/failed_ratio"] == 0 for r in found)
    assert max(r["rollout/fully_async/generation_span"] for r in found) > 0
    groups = [
        group for file in (run / "trajectories").glob("*.mls") for group in wire.decode(file.read_bytes(), list[Group])
    ]
    trajectories = [t for group in groups for t in group]
    assert not any(t.status is Status.ABORTED for t in trajectories)
    crossing = [t for t in trajectories if t.oldest_version != t.newest_version]
    assert crossing
    for t in trajectories:
        spans = t.version_spans
        assert (spans[0].start, spans[-1].end) == (t.turns[0].start, t.num_tokens), "every sampled token is in a span"
        assert all(a.end == b.start and a.version < b.version for a, b in itertools.pairwise(spans))
