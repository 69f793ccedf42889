"""A real verifiers environment over a real session server: its episodes become audited trajectories."""

from __future__ import annotations

import json

import pytest
from session_factories import ScriptedEngine

pytest.importorskip("verifiers")

from miles_contracts import InvalidFieldError, SamplingParams, Status
from miles_rollout.environments.verifiers import VerifiersEnvironment
from miles_rollout.session import SessionConfig, SessionServer, agent_generate

SAMPLING = SamplingParams(max_new_tokens=64)
CONFIG = {
    "taskset": {"id": "miles_echo_taskset"},
    "agent": {"harness": {"id": "miles_echo_taskset"}, "runtime": {"type": "subprocess"}},
}


async def episode(renderer, replies, *, config=CONFIG, item: int = 0, token: str | None = "secret"):
    environment = VerifiersEnvironment(config)
    task = environment.tasks(shuffle=False).at(item)
    engine = ScriptedEngine(renderer, replies)
    async with environment.serving(), SessionServer(engine, renderer, SessionConfig(), token=token) as server:
        generate = agent_generate(environment.agent, server, sampling=SAMPLING)
        (trajectory,) = await generate(task, 0, 0)
    return trajectory, generate


@pytest.mark.parametrize("token", ["secret", None])
async def test_a_solved_episode(renderer, token: str | None) -> None:
    trajectory, generate = await episode(renderer, ["alpha"], token=token)
    assert trajectory.error is None
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 1.0)
    assert trajectory.metrics["reward/exact"] == 1.0
    assert trajectory.metrics["length"] == 5.0
    assert trajectory.metrics["turns"] == 1.0
    assert generate.report.tokens_audited == trajectory.num_trained > 0
    assert trajectory.metadata["environment"] == "miles_echo_taskset"


async def test_two_turns_are_one_trajectory(renderer) -> None:
    trajectory, _ = await episode(renderer, ["wrong", "beta"], item=1)
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.metrics["turns"]) == (1.0, 2.0)
    assert len(trajectory.version_spans) == 2


async def test_an_unsolved_episode_is_a_reward_of_zero_and_no_failure(renderer) -> None:
    trajectory, _ = await episode(renderer, ["wrong", "again"])
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 0.0)


async def test_an_episode_that_cannot_be_scored_is_a_failure(renderer) -> None:
    config = {**CONFIG, "taskset": {"id": "miles_echo_taskset", "words": ["unscorable"]}}
    trajectory, _ = await episode(renderer, ["x", "y"], config=config)
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None
    assert "the judge is gone" in (trajectory.error or "")


async def test_a_failing_engine_is_a_failure(renderer) -> None:
    trajectory, _ = await episode(renderer, [RuntimeError("no memory")] * 9)
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None


def test_tasks_are_a_resumable_stream() -> None:
    environment = VerifiersEnvironment(CONFIG)
    tasks = environment.tasks(seed=1)
    first = [tasks.next() for _ in range(7)]
    assert sorted(t.messages[0].content for t in first[:3]) == ["Say alpha.", "Say beta.", "Say gamma."]
    again = environment.tasks(seed=1)
    again.restore(json.loads(json.dumps({**tasks.state(), "next": 4})))
    assert [again.next() for _ in range(3)] == first[4:]
    assert VerifiersEnvironment(CONFIG, limit=2).tasks().size == 2
    with pytest.raises(InvalidFieldError, match="fingerprint"):
        again.restore(VerifiersEnvironment(CONFIG, limit=2).tasks(seed=1).state())


async def test_foreign_tasks_and_bad_configurations_are_refused() -> None:
    environment = VerifiersEnvironment(CONFIG)
    other = VerifiersEnvironment({**CONFIG, "taskset": {"id": "miles_echo_taskset", "words": ["delta"]}})
    with pytest.raises(InvalidFieldError, match="the taskset has changed"):
        await environment.agent("http://x", other.tasks().at(0), SAMPLING, {})
    with pytest.raises(InvalidFieldError, match="cannot be loaded"):
        VerifiersEnvironment({"taskset": {"id": "no_such_taskset_anywhere"}})
