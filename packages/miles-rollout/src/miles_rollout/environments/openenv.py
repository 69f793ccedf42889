"""Environments of OpenEnv: a server that is reset and stepped, and the policy's answers are its actions.

The environment runs as its own server (a container, a process, another machine) and is spoken to in OpenEnv's protocol
through OpenEnv's generic client, so none of its code is needed here. An episode resets it, shows the policy what it
observes, sends back what the policy says, and ends when the environment says so or after `max_turns`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from typing import Any

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Task
from miles_rollout.environments.conversation import Conversation
from miles_rollout.environments.errors import EnvironmentFailedError

_KEY = "openenv"


class Scoring(StrEnum):
    """How the rewards of an episode's steps become one."""

    SUM = "sum"
    LAST = "last"


class OpenEnvEnvironment:
    """One environment server.

    Args:
        url: its base URL, for example `http://127.0.0.1:8000`.
        action: the action that an answer stands for: the name of the field that holds the text, or a function from
            text to the action.
        observation: the text that the policy is shown: the name of the field that holds it, or a function from
            observation to text. Without it the one string that the observation has.
        max_turns: answers of one episode.
        scoring: how the rewards of the steps become the episode's.
        max_sessions: episodes at the same time; a server of OpenEnv allows one unless told otherwise.
        message_timeout_s: longest wait for one answer of the server.

    `agent` is a `miles_contracts.Agent`; hand it to an `AgentGenerate`, or name it as a run's `task.agent`. A task
    begins the conversation with its own messages, if it has any; `task.metadata["openenv"]` goes into the reset (its
    `seed`, say). Without it the seed is the prompt's number, so that the members of a group meet the same episode. An
    episode that its limits end before any reward has 0.

    Raises:
        ImportError: openenv-core is not installed.
        InvalidFieldError: a value that cannot be.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str | Callable[[str], Mapping[str, Any]] = "message",
        observation: str | Callable[[Mapping[str, Any]], str] | None = None,
        max_turns: int = 16,
        scoring: Scoring = Scoring.SUM,
        max_sessions: int = 1,
        message_timeout_s: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise InvalidFieldError("url", url, "give the server's URL, like http://127.0.0.1:8000")
        for name, count in (("max_turns", max_turns), ("max_sessions", max_sessions)):
            if count < 1:
                raise InvalidFieldError(name, count, "use a value >= 1")
        if not (math.isfinite(message_timeout_s) and message_timeout_s > 0):
            raise InvalidFieldError("message_timeout_s", message_timeout_s, "use a finite number of seconds > 0")
        self._client, self._broken = _library()
        self._url = url
        self._action = action
        self._observation = observation
        self._max_turns = max_turns
        self._scoring = Scoring(scoring)
        self._free = asyncio.Semaphore(max_sessions)
        self._timeout_s = message_timeout_s

    async def agent(
        self, base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]
    ) -> AgentResult:
        """One episode: a `miles_contracts.Agent`.

        Raises:
            EnvironmentFailedError: the server failed, or gave no reward to an episode that it ended.
            InvalidFieldError: the observation has not the text that was asked for.
        """
        rewards: list[float] = []
        async with self._free, self._server() as server:
            with self._faults():
                result = await server.reset(**self._reset(task))
            async with Conversation(base_url, task.messages, params, metadata) as talk:
                talk.say(self._text(result.observation))
                while True:
                    answer = await talk.answer()
                    if talk.cut:  # half an action is none
                        return self._result(rewards, talk.turns, "length")
                    with self._faults():
                        result = await server.step(self._act(answer))
                    if result.reward is not None:
                        rewards.append(self._number(result.reward))
                    if result.done:
                        if not rewards:
                            raise EnvironmentFailedError(f"{self._url}: the episode ended without a reward")
                        return self._result(rewards, talk.turns, "done")
                    if talk.turns >= self._max_turns:
                        return self._result(rewards, talk.turns, "max_turns")
                    talk.say(self._text(result.observation))

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[Any]:
        client = self._client(base_url=self._url, message_timeout_s=self._timeout_s)
        with self._faults():
            await client.connect()
        try:
            yield client
        finally:
            await client.disconnect()

    @contextlib.contextmanager
    def _faults(self) -> Any:
        """What goes wrong with the server fails the episode, with a reason."""
        try:
            yield
        except self._broken as error:
            raise EnvironmentFailedError(f"{self._url}: {type(error).__name__}: {error}") from error

    def _reset(self, task: Task) -> dict[str, Any]:
        given = task.metadata.get(_KEY)
        if given is None:
            return {"seed": task.prompt_index}
        if not isinstance(given, Mapping):
            raise InvalidFieldError("task.metadata.openenv", given, "give the arguments of reset as an object")
        return dict(given)

    def _act(self, answer: str) -> dict[str, Any]:
        return {self._action: answer} if isinstance(self._action, str) else dict(self._action(answer))

    def _text(self, observation: Mapping[str, Any]) -> str:
        if callable(self._observation):
            return self._observation(observation)
        texts = {k: v for k, v in observation.items() if isinstance(v, str)}
        if self._observation is not None:
            if self._observation not in texts:
                raise InvalidFieldError("observation", self._observation, f"it has the texts {', '.join(texts)}")
            return texts[self._observation]
        if len(texts) != 1:
            raise InvalidFieldError("observation", None, f"say which to show: it has {', '.join(texts) or 'no text'}")
        return next(iter(texts.values()))

    def _number(self, reward: Any) -> float:
        value = float(reward)
        if not math.isfinite(value):
            raise EnvironmentFailedError(f"{self._url}: the reward is {value}")
        return value

    def _result(self, rewards: list[float], turns: int, stop: str) -> AgentResult:
        score = None
        if rewards:
            score = math.fsum(rewards) if self._scoring is Scoring.SUM else rewards[-1]
        return AgentResult(
            reward=0.0 if score is None else score,
            metrics={"environment_turns": float(turns)},
            metadata={"environment": self._url, "stop": stop},
        )


def _library() -> tuple[Any, tuple[type[BaseException], ...]]:
    """The generic client, and what it raises when the server fails."""
    try:
        client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        broken = importlib.import_module("websockets.exceptions").WebSocketException
    except ImportError as error:
        raise ImportError("OpenEnv environments need that package: pip install 'miles-rollout[openenv]'") from error
    # The client raises RuntimeError for what the server reports.
    return client, (ConnectionError, RuntimeError, TimeoutError, OSError, ValueError, broken)
