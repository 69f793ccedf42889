"""Environments of the verifiers library (v1): their tasksets are task sources, their episodes are agents.

A verifiers environment drives a model over an OpenAI-compatible endpoint. Here that endpoint is a session of the
session server, which owns the tokens; what verifiers records of the conversation is used for the reward only. Its
own tasksets (harbor, openenv, nemo_gym, textarena) come with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from miles_contracts import AgentResult, InvalidFieldError, Message, SamplingParams, Task
from miles_rollout.environments.errors import EnvironmentFailedError
from miles_rollout.tasks import TaskStream

_KEY = "verifiers"


class VerifiersTasks(TaskStream):
    """The taskset of an environment, loaded completely.

    Args:
        tasks: the environment's tasks.
        source: name of the taskset.
        seed: of the order of each epoch.
        shuffle: False keeps the order of the taskset.
    """

    def __init__(self, tasks: Sequence[Any], *, source: str, seed: int = 0, shuffle: bool = True) -> None:
        self._tasks = tasks
        self._source = source
        super().__init__(size=len(tasks), seed=seed, shuffle=shuffle)

    def _task(self, item: int, prompt_index: int) -> Task:
        data = self._tasks[item].data
        return Task(
            prompt_index=prompt_index,
            # For people and records: the environment itself makes the prompt of its episode.
            messages=(Message(role="user", content=data.prompt_text or data.name or self._source),),
            metadata={_KEY: {"item": item, "key": self._tasks[item].key}},
            source=self._source,
        )

    def _fingerprint(self) -> str:
        keys = msgspec.json.encode([task.key for task in self._tasks])
        return hashlib.blake2b(keys, digest_size=16).hexdigest()


class VerifiersEnvironment:
    """One environment.

    Args:
        config: the environment's configuration as verifiers takes it, for example
            `{"taskset": {"id": "gsm8k-v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}`.
            Its default runtime is a remote sandbox, which needs an account there.
        limit: use at most this many tasks; needed for an endless taskset.

    Use it inside `serving()`, and hand `agent` to an `AgentGenerate`. Turns of one episode must all extend each
    other where the session is linear; several agents that take part in one episode need a branching session.

    Raises:
        ImportError: verifiers is not installed.
        InvalidFieldError: the configuration is refused, or the taskset is empty or endless.
    """

    def __init__(self, config: Mapping[str, Any], *, limit: int | None = None) -> None:
        self._v1 = v1 = _library()
        try:
            resolved = v1.resolve_env_config(dict(config))
            self._env: Any = v1.load_environment(resolved)
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise InvalidFieldError("verifiers environment", dict(config), f"it cannot be loaded: {error}") from error
        taskset = self._env.taskset if limit is None else self._env.taskset.take(limit)
        if not taskset.bounded:
            raise InvalidFieldError("limit", limit, "the taskset is endless; say how many tasks to use")
        self._tasks = list(taskset)
        self._name: str = resolved.env_id

    @property
    def name(self) -> str:
        """The environment, as verifiers names it."""
        return self._name

    def tasks(self, *, seed: int = 0, shuffle: bool = True) -> VerifiersTasks:
        """Its tasks as a resumable stream."""
        return VerifiersTasks(self._tasks, source=self._name, seed=seed, shuffle=shuffle)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[VerifiersEnvironment]:
        """Hold what all episodes share (tool servers, the environment's own proxy)."""
        async with self._env.serving():
            yield self

    async def agent(
        self, base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]
    ) -> AgentResult:
        """One episode: a `miles_contracts.Agent`.

        Raises:
            EnvironmentFailedError: the episode failed, was not scored, or had no agent to be trained.
        """
        v1 = self._v1
        context = v1.ModelContext(
            model="policy",
            client=v1.EvalClientConfig(base_url=base_url, api_key_var=_key_variable(metadata)),
            sampling=v1.SamplingConfig(max_tokens=params.max_new_tokens),
        )
        episode = await self._env.run_episode(self._item(task), context)
        if not episode.ok:
            raise EnvironmentFailedError(f"{self._name}: {_first_error(episode)}")
        trained = [t for t in episode.traces if t.agent is None or t.agent.trainable is not False]
        if not trained:
            raise EnvironmentFailedError(f"{self._name}: no agent of the episode is trainable")
        return _result(self._name, trained[0], len(episode.traces))

    def _item(self, task: Task) -> Any:
        found = task.metadata.get(_KEY)
        if not isinstance(found, dict) or not 0 <= found.get("item", -1) < len(self._tasks):
            raise InvalidFieldError("task.metadata.verifiers", found, f"this is no task of {self._name}")
        item = self._tasks[found["item"]]
        if item.key != found["key"]:
            raise InvalidFieldError("task.metadata.verifiers.key", found["key"], "the taskset has changed")
        return item


def _library() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ImportError("verifiers environments need that package: pip install 'miles-rollout[verifiers]'") from error


def _key_variable(metadata: Mapping[str, Any]) -> str:
    """Name of the environment variable that holds the session server's key: verifiers reads keys from nowhere else.
    The name belongs to the key, so that two servers in one process do not disturb each other."""
    key = str(metadata.get("api_key") or "none")
    name = f"MILES_SESSION_KEY_{hashlib.blake2b(key.encode(), digest_size=8).hexdigest().upper()}"
    os.environ[name] = key
    return name


def _first_error(episode: Any) -> str:
    for error in [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]:
        return f"{error.type}: {error.message}"
    return "the episode did not end well, and says no more"


def _result(name: str, trace: Any, agents: int) -> AgentResult:
    """Reward and figures of the agent that is trained."""
    unscored = [key for key, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        raise EnvironmentFailedError(f"{name}: {'not scored: ' + unscored[0] if unscored else 'it gives no reward'}")
    figures = {f"reward/{key}": float(reward.value) for key, reward in trace.rewards.items()}
    figures |= {key: float(value) for key, value in trace.metrics.items() if value is not None}
    reward = float(trace.reward)
    if not math.isfinite(reward):
        raise EnvironmentFailedError(f"{name}: the reward is {reward}")
    return AgentResult(
        reward=reward,
        metrics={key: value for key, value in figures.items() if math.isfinite(value)},
        metadata={"environment": name, "agents": agents, "stop": str(trace.stop_condition)},
    )
