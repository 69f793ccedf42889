"""The audit finds every way in which a trained token can fail to be what the engine sampled."""

from __future__ import annotations

import numpy as np
import pytest
from session_factories import assistant, generation, user

from miles_contracts import SamplingTransform, TrajectoryIdentity, Turn
from miles_rollout.session.assemble import trajectories
from miles_rollout.session.audit import AuditReport, SessionCounters, audit, record
from miles_rollout.session.nodes import path_ids, path_prompt
from miles_rollout.session.tree import Policy, SessionTree


@pytest.fixture
def made():
    tree = SessionTree(Policy.BRANCHING)
    records = {}

    def turn(messages, reply, prompt, ids):
        plan = tree.plan(messages)
        sampled = generation(ids, f"r{len(tree.nodes)}")
        given = path_prompt(plan.parent).extended(np.asarray(prompt, np.int32))
        records[sampled.request_id] = record(sampled.request_id, given, sampled.output_ids, sampled.logprobs)
        return tree.commit(plan, np.asarray(prompt, np.int32), sampled, reply)

    turn([user("a")], assistant("A"), [1, 2], [3, 4])
    turn([user("a"), assistant("A"), user("b")], assistant("B"), [5], [6, 7])
    turn([user("a"), assistant("A"), user("c")], assistant("C"), [8], [9])
    identity = TrajectoryIdentity(prompt_index=0, member=0)
    counters = SessionCounters(turns=3, repairs={"x": 1})
    found = trajectories(tree, identity, SamplingTransform(), records=records, counters=counters)
    assert path_ids(tree.nodes[1].path()).tolist() == found[0].token_ids.tolist()
    return found


def test_all_is_well(made) -> None:
    report = audit(made)
    assert (report.tokens_audited, report.mismatches, report.trajectories, report.turns) == (5, 0, 2, 4)
    assert report.sessions.turns == 3
    assert (report + report).to_metrics()["session/repairs/x"] == 2


def changed(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("change", "bad", "says"),
    [
        (lambda t: {"token_ids": changed(t.token_ids, 6, 42)}, 2, "not those that the engine sampled"),
        (lambda t: {"logprobs": changed(t.logprobs, 6, -9)}, 2, "not those that the engine sampled"),
        (lambda t: {"token_ids": changed(t.token_ids, 4, 42)}, 2, "the prompt is not the one"),
        (lambda t: {"token_ids": changed(t.token_ids, 0, 42)}, 4, "the prompt is not the one"),
        (lambda t: {"metadata": {}}, 4, "no record"),
        (lambda t: {"turns": t.turns[:1]}, 2, "belongs to no turn"),
        (
            lambda t: {"turns": (t.turns[0], Turn(start=6, end=7, finish_reason="stop", request_id="r1"))},
            2,
            "belongs to no turn|sampled 2 tokens after 5",
        ),
    ],
)
def test_a_change_is_found(made, change, bad, says) -> None:
    report = audit([made[0].replace(**change(made[0]))])
    assert report.mismatches == bad
    import re

    assert re.search(says, report.first_mismatch)


def test_training_a_turn_twice_is_found(made) -> None:
    twice = made[1].replace(loss_mask=~np.isnan(made[1].logprobs))
    report = audit([made[0], twice])
    assert report.mismatches == 2
    assert "trained already" in report.first_mismatch


def test_reports_add_up() -> None:
    a = AuditReport(tokens_audited=1, mismatches=1, first_mismatch="x", sessions=SessionCounters(turns=1))
    b = AuditReport(tokens_audited=2, first_mismatch="y", sessions=SessionCounters(turns=2, repairs={"k": 1}))
    total = a + b
    assert (total.tokens_audited, total.mismatches, total.first_mismatch) == (3, 1, "x")
    assert total.sessions == SessionCounters(turns=3, repairs={"k": 1})
