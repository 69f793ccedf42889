"""Real problems of reasoning-gym with several attempts, over a real session server."""

from __future__ import annotations

import pytest
from session_factories import ScriptedEngine

pytest.importorskip("reasoning_gym")

from miles_contracts import InvalidFieldError, Message, SamplingParams, Status, Task
from miles_rollout.environments.reasoning_gym import ReasoningGymEnvironment
from miles_rollout.session import SessionConfig, SessionServer, agent_generate
from miles_rollout.tasks import ReasoningGymTasks

SAMPLING = SamplingParams(max_new_tokens=64)
PROBLEM = ReasoningGymTasks("chain_sum", seed=4, size=3).at(0)
RIGHT = str(PROBLEM.label)


async def episode(renderer, replies: list, problem: Task = PROBLEM, **options):
    engine = ScriptedEngine(renderer, replies)
    async with SessionServer(engine, renderer, SessionConfig(), token="secret") as server:
        generate = agent_generate(ReasoningGymEnvironment(**options).agent, server, sampling=SAMPLING)
        (trajectory,) = await generate(problem, 0, 0)
    return trajectory


async def test_right_at_once(renderer) -> None:
    trajectory = await episode(renderer, [RIGHT])
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert trajectory.metrics["environment_turns"] == 1.0
    assert trajectory.metadata["environment"] == "reasoning_gym:chain_sum"


async def test_right_at_the_third_attempt_is_worth_less(renderer) -> None:
    trajectory = await episode(renderer, ["0", "1", RIGHT], discount=0.5, feedback="Score {score:.2f}.")
    assert trajectory.reward == pytest.approx(0.25)
    assert len(trajectory.version_spans) == 3
    said = [m["content"] for m in trajectory.metadata["messages"] if m["role"] == "user"]
    assert said[1].startswith("Score 0.")


async def test_attempts_run_out(renderer) -> None:
    trajectory = await episode(renderer, ["no idea", "still none"], attempts=2)
    assert trajectory.status is Status.FINISHED
    assert trajectory.reward < 0.1
    assert trajectory.metadata["solved"] is False


async def test_a_foreign_task_fails(renderer) -> None:
    foreign = Task(prompt_index=0, messages=(Message(role="user", content="1 + 1?"),))
    trajectory = await episode(renderer, ["2"], foreign)
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None


@pytest.mark.parametrize(
    ("field", "options"),
    [("attempts", {"attempts": 0}), ("discount", {"discount": 0.0}), ("feedback", {"feedback": "{points}"})],
)
def test_values_that_cannot_be_are_refused(field: str, options: dict) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        ReasoningGymEnvironment(**options)
    assert caught.value.field == field
