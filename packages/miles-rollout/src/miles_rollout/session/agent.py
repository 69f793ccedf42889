"""Run an agent against the session server: an episode in, trajectories out.

The agent is a black box that gets a base URL. What it did to the policy is read from the session afterwards; how it
ended is a status, never a reward: an exception is FAILED, a timeout ABORTED, and neither becomes a zero.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from miles_contracts import (
    Agent,
    AgentResult,
    InvalidFieldError,
    Reward,
    SamplingParams,
    Status,
    Task,
    Trajectory,
)
from miles_rollout.generate.trajectories import derive_seed, failed_trajectory
from miles_rollout.raised import describe_raised
from miles_rollout.session.audit import AuditReport, audit
from miles_rollout.session.matching import Repair
from miles_rollout.session.requests import OpenRequest
from miles_rollout.session.server import SessionServer
from miles_rollout.session.tree import Policy


class AgentGenerate:
    """A `miles_contracts.Generate` that runs an agent in a session of its own.

    Args:
        agent: the harness.
        server: a started session server.
        sampling: pinned for all turns, whatever the harness asks for (it may ask for a smaller budget, stop
            strings and seeds); its `seed` is replaced by one derived from run, prompt, member and attempt.
        run_seed: see `derive_seed`.
        timeout_s: longest episode.
        reward: scores the text of the last turn when the agent gives no reward itself; None leaves it unscored.
        policy: of the session, None for the server's.
        thinking: switches the family's reasoning, None for its default.
        keep_messages: put the conversation into `metadata["messages"]`, for people and judges.

    The agent is called with the session's base URL, the task, the sampling settings and metadata: `session_id`,
    `api_key` (the server's token, or "none"), `prompt_index`, `member`, `attempt`, and the task's own metadata
    under `task`. Its `metrics` and `metadata` go into every trajectory of the episode.

    Attributes:
        report: the audit of all episodes so far.
    """

    def __init__(
        self,
        agent: Agent,
        server: SessionServer,
        *,
        sampling: SamplingParams,
        run_seed: int = 0,
        timeout_s: float = 600.0,
        reward: Reward | None = None,
        policy: Policy | None = None,
        thinking: bool | None = None,
        keep_messages: bool = True,
    ) -> None:
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise InvalidFieldError("timeout_s", timeout_s, "use a finite number of seconds > 0")
        _ = sampling.transform
        self.report = AuditReport()
        self._fresh = AuditReport()
        self._agent = agent
        self._server = server
        self._sampling = sampling
        self._run_seed = run_seed
        self._timeout_s = timeout_s
        self._reward = reward
        self._policy = policy
        self._thinking = thinking
        self._keep_messages = keep_messages

    def take_metrics(self) -> dict[str, float]:
        """Audit and counters of the episodes that ended since the last call, under `rollout/session/`."""
        fresh, self._fresh = self._fresh, AuditReport()
        counts = fresh.sessions.to_metrics() | {
            "tokens_audited": float(fresh.tokens_audited),
            "mismatches": float(fresh.mismatches),
        }
        none = {f"repairs/{kind}": 0.0 for kind in Repair}
        return {f"rollout/session/{name}": value for name, value in (none | counts).items()}

    async def __call__(self, task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        """One episode. Its trajectories share the episode's reward; a failed one without turns is one empty one."""
        seed = derive_seed(self._run_seed, task.prompt_index, member, attempt)
        sampling = msgspec.structs.replace(self._sampling, seed=seed)
        service = self._server.service
        session = service.open(
            OpenRequest(
                policy=self._policy,
                sampling=sampling,
                thinking=self._thinking,
                prompt_index=task.prompt_index,
                member=member,
                attempt=attempt,
            )
        )
        metadata = {
            "session_id": session.id,
            "api_key": self._server.token or "none",
            "prompt_index": task.prompt_index,
            "member": member,
            "attempt": attempt,
            "task": task.metadata,
        }
        started = time.monotonic()
        try:
            outcome = await self._run(task, sampling, self._server.session_url(session.id), metadata)
            found = service.trajectories(session.id)
            messages = session.describe()["messages"] if self._keep_messages else None
            last = session.last_reply()
        finally:
            service.close(session.id)
        if not found:
            reason = outcome.error or "the agent ended without a single turn"
            empty = failed_trajectory(task, member, attempt, reason)
            return (empty.replace(status=outcome.status or empty.status),)
        if outcome.status is None and outcome.result.reward is None and self._reward is not None:
            outcome = await self._score(task, last, outcome)
        outcome.result.metrics.setdefault("episode_seconds", time.monotonic() - started)
        return self._finish(found, outcome, messages)

    async def _run(self, task: Task, params: SamplingParams, url: str, metadata: dict[str, Any]) -> _Outcome:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                result: object = await self._agent(url, task, params, metadata)
        except TimeoutError as error:
            if deadline.expired():
                return _Outcome(Status.ABORTED, f"the episode took longer than {self._timeout_s:g} s")
            return _failure("the agent", error)
        except Exception as error:  # noqa: BLE001 - the agent is somebody else's program: its errors are outcomes
            return _failure("the agent", error)
        if not isinstance(result, AgentResult):
            return _Outcome(Status.FAILED, f"the agent returned {type(result).__name__}, not an AgentResult")
        if result.reward is not None and not math.isfinite(result.reward):
            return _Outcome(Status.FAILED, f"the agent's reward is {result.reward}, not a finite number")
        bad = [name for name, value in result.metrics.items() if not math.isfinite(value)]
        if bad:
            return _Outcome(Status.FAILED, f"the agent's metric {bad[0]!r} is not a finite number")
        return _Outcome(None, None, msgspec.structs.replace(result, metrics=dict(result.metrics)))

    async def _score(self, task: Task, response: str, outcome: _Outcome) -> _Outcome:
        assert self._reward is not None
        try:
            value = self._reward(task, response)
            reward = float(await value if isinstance(value, Awaitable) else value)
        except Exception as error:  # noqa: BLE001 - a user's reward: its errors are outcomes
            return _failure("the reward", error)
        if not math.isfinite(reward):
            return _Outcome(Status.FAILED, f"the reward is {reward}, not a finite number")
        return _Outcome(None, None, msgspec.structs.replace(outcome.result, reward=reward))

    def _finish(
        self, found: Sequence[Trajectory], outcome: _Outcome, messages: list[dict[str, Any]] | None
    ) -> tuple[Trajectory, ...]:
        report = audit(found)
        self.report = self.report + report
        self._fresh = self._fresh + report
        if report.mismatches:
            outcome = _Outcome(Status.FAILED, f"audit: {report.mismatches} tokens differ: {report.first_mismatch}")
        result = outcome.result
        out = []
        for leaf, trajectory in enumerate(found):
            metadata = {**result.metadata, **trajectory.metadata}
            if messages is not None and leaf == 0:
                metadata["messages"] = messages
            metrics = {**result.metrics, "turns": float(len(trajectory.turns))}
            out.append(
                trajectory.replace(
                    status=outcome.status or trajectory.status,
                    reward=result.reward,
                    metrics=metrics,
                    metadata=metadata,
                    error=outcome.error,
                )
            )
        return tuple(out)


class _Outcome(msgspec.Struct, frozen=True):
    """How an episode ended; status None leaves it to the tokens."""

    status: Status | None
    error: str | None
    result: AgentResult = msgspec.field(default_factory=lambda: AgentResult(metrics={}))


def _failure(who: str, error: Exception) -> _Outcome:
    return _Outcome(Status.FAILED, f"{who} failed: {describe_raised(error, who)}")


def agent_generate(agent: Agent, server: SessionServer, **options: Any) -> AgentGenerate:
    """`AgentGenerate(agent, server, ...)`, named after what it makes."""
    return AgentGenerate(agent, server, **options)
