"""An agent talks chat; the trainer gets the tokens that were sampled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from loop_toy.harness import Command, records

from miles_contracts import Group, wire
from miles_loop.report import Sessions, make_report, text


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


def test_report_shows_what_an_agent_did_to_its_sessions(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fast.run(*("train", "--run-dir", run, "--plain", "--steps", 3), *("--task.agent", "loop_toy.agent:careless"))
    steps = [r for r in records(run) if r["step"] > 0]
    figures = msgspec.convert(make_report(run).sessions, Sessions)
    assert figures.tokens_audited >= sum(r["rollout/tokens_trained"] for r in steps) > 0
    assert figures.mismatches == 0
    assert figures.abandoned_turns >= figures.trajectories  # every first answer was asked for again
    assert figures.turns > figures.abandoned_turns
    assert figures.repairs["whitespace_edges"] > 0 == figures.repairs["reasoning_omitted"]
    assert figures.repairs["whitespace_edges"] == sum(r["rollout/session/repairs/whitespace_edges"] for r in steps)
    assert figures.turns == sum(r["rollout/session/turns"] for r in steps)
    shown = text(make_report(run))
    assert f"{figures.tokens_audited:,}, mismatches 0" in shown
    assert f"whitespace_edges {figures.repairs['whitespace_edges']:,}" in shown
    assert f"{figures.abandoned_turns:,} of {figures.turns:,}" in shown


def test_report_of_a_task_without_an_agent_has_no_sessions(fast: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fast.run("train", "--run-dir", run, "--plain", "--steps", 1)
    assert make_report(run).sessions is None
    assert "tokens audited" not in text(make_report(run))
