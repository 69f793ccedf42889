"""A real OpenEnv server in its own process, over a real session server: its episodes become audited trajectories."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from session_factories import ScriptedEngine

pytest.importorskip("openenv")

from miles_contracts import InvalidFieldError, Message, SamplingParams, Status, Task
from miles_rollout.environments.openenv import OpenEnvEnvironment, Scoring
from miles_rollout.session import SessionConfig, SessionServer, agent_generate

SAMPLING = SamplingParams(max_new_tokens=64)
NUMBER = random.Random(3).randint(1, 9)
WRONG = [str(n) for n in range(1, 10) if n != NUMBER]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a running server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Path(__file__).with_name("openenv_guess_server.py")
    process = subprocess.Popen([sys.executable, str(script), str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def task(prompt_index: int = 3, **metadata: Any) -> Task:
    return Task(prompt_index=prompt_index, messages=(Message(role="user", content="Play a game."),), metadata=metadata)


async def episode(renderer, environment: OpenEnvEnvironment, replies: list, problem: Task | None = None):
    engine = ScriptedEngine(renderer, replies)
    async with SessionServer(engine, renderer, SessionConfig(), token="secret") as server:
        generate = agent_generate(environment.agent, server, sampling=SAMPLING)
        (trajectory,) = await generate(problem or task(), 0, 0)
    return trajectory, generate


async def test_a_game_that_is_won(url: str, renderer) -> None:
    trajectory, generate = await episode(renderer, OpenEnvEnvironment(url), [WRONG[0], "what?", str(NUMBER)])
    assert trajectory.error is None
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 0.5)
    assert trajectory.metrics["environment_turns"] == 3.0
    assert trajectory.metadata["stop"] == "done"
    assert len(trajectory.version_spans) == 3
    assert generate.report.tokens_audited == trajectory.num_trained > 0
    said = [m["content"] for m in trajectory.metadata["messages"] if m["role"] == "user"]
    assert said[0] == "Play a game.\n\nGuess a number between 1 and 9."
    assert said[1] in ("Higher.", "Lower.")
    assert said[2] == "That is no number."


async def test_the_last_reward_instead_of_the_sum(url: str, renderer) -> None:
    environment = OpenEnvEnvironment(url, scoring=Scoring.LAST)
    trajectory, _ = await episode(renderer, environment, ["what?", str(NUMBER)])
    assert trajectory.reward == 1.0


async def test_an_episode_ends_with_its_turns(url: str, renderer) -> None:
    trajectory, _ = await episode(renderer, OpenEnvEnvironment(url, max_turns=2), WRONG[:2])
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 0.0)
    assert trajectory.metadata["stop"] == "max_turns"


async def test_the_task_says_how_to_reset(url: str, renderer) -> None:
    for number in (2, 8):
        problem = task(openenv={"number": number})
        trajectory, _ = await episode(renderer, OpenEnvEnvironment(url), [str(number)], problem)
        assert (trajectory.reward, trajectory.error) == (1.0, None)


async def test_functions_for_action_and_observation(url: str, renderer) -> None:
    environment = OpenEnvEnvironment(
        url, action=lambda text: {"message": text.removeprefix("I say ")}, observation=lambda seen: f"<{seen['text']}>"
    )
    trajectory, _ = await episode(renderer, environment, [f"I say {NUMBER}"])
    assert trajectory.reward == 1.0
    assert trajectory.metadata["messages"][0]["content"].endswith("<Guess a number between 1 and 9.>")


async def test_more_episodes_than_the_server_takes_wait_for_each_other(url: str, renderer) -> None:
    environment = OpenEnvEnvironment(url, max_sessions=2)
    engine = ScriptedEngine(renderer, [str(NUMBER)] * 12)
    async with SessionServer(engine, renderer, SessionConfig()) as server:
        generate = agent_generate(environment.agent, server, sampling=SAMPLING)
        made = await asyncio.gather(*(generate(task(), member, 0) for member in range(12)))
    assert [t.reward for (t,) in made] == [1.0] * 12


@pytest.mark.parametrize(
    ("replies", "options", "says"),
    [
        (["crash"], {}, "the table fell over"),
        (["give up"], {}, "ended without a reward"),
        (["1"], {"action": "no_such_field"}, "VALIDATION_ERROR"),
        ([RuntimeError("no memory")] * 9, {}, "no answer from the policy"),
    ],
)
async def test_what_goes_wrong_fails_the_trajectory(
    url: str, renderer, replies: list, options: dict, says: str
) -> None:
    trajectory, _ = await episode(renderer, OpenEnvEnvironment(url, **options), replies)
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None
    assert says in (trajectory.error or "")


async def test_no_server_fails_the_trajectory(renderer) -> None:
    trajectory, _ = await episode(renderer, OpenEnvEnvironment("http://127.0.0.1:9"), ["1"])
    assert trajectory.status is Status.FAILED
    assert "ConnectionError" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_turns", {"max_turns": 0}),
        ("max_sessions", {"max_sessions": 0}),
        ("message_timeout_s", {"message_timeout_s": 0.0}),
    ],
)
def test_values_that_cannot_be_are_refused(field: str, options: dict) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        OpenEnvEnvironment("http://x", **options)
    assert caught.value.field == field


def test_addresses_and_observations_are_checked() -> None:
    with pytest.raises(InvalidFieldError, match="give the server's URL"):
        OpenEnvEnvironment("localhost:8000")
    with pytest.raises(InvalidFieldError, match="it has a, b"):
        OpenEnvEnvironment("http://x")._text({"a": "1", "b": "2", "c": 3})
    with pytest.raises(InvalidFieldError, match="it has the texts a"):
        OpenEnvEnvironment("http://x", observation="z")._text({"a": "1"})
    with pytest.raises(InvalidFieldError, match=r"task\.metadata\.openenv"):
        OpenEnvEnvironment("http://x")._reset(task(openenv=3))
    assert OpenEnvEnvironment("http://x")._reset(task()) == {"seed": 3}
