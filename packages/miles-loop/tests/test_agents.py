"""An agent talks chat; the trainer gets the tokens that were sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_toy.harness import Command, records

from miles_contracts import Group, wire


@pytest.mark.parametrize("depth", [0, 1])
def test_an_agent_task_is_trained_on_exact_tokens(fast: Command, tmp_path: Path, depth: int) -> None:
    run = tmp_path / "run"
    fast.run(
        *("train", "--run-dir", run, "--plain", "--steps", 3, "--pipeline-depth", depth),
        *("--task.agent", "loop_toy.agent:two_turns"),
    )
    found = records(run)
    assert [r["step"] for r in found] == [0, 1, 2, 3]
    assert all(r["rollout/token_mismatches"] == 0 and r["rollout/tokens_trained"] > 0 for r in found[1:])
    assert any(r["rollout/turns/mean"] > 1 for r in found[1:])
    assert found[1]["rollout/metrics/said"] > 0
    assert 0 < found[0]["eval/vowels/reward"] <= 1
    groups = wire.decode((run / "trajectories" / "step_000001.mls").read_bytes(), list[Group])
    assert all(turn.request_id for g in groups for t in g for turn in t.turns)
