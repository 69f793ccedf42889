"""Episodes: the members of a group, run side by side, each ending in trajectories or in a counted failure."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from miles_contracts import Generate, Group, InvalidFieldError, MilesError, Status, Task, Trajectory
from miles_rollout.generate.trajectories import failed_trajectory
from miles_rollout.ledger import Issue
from miles_rollout.raised import describe_raised
from miles_rollout.rewards.base import check_value

GroupReward = Callable[[Task, Sequence[Trajectory]], Awaitable[Sequence[float]] | Sequence[float]]
"""Scores all trajectories of a group together, one number each."""


class ErrorPolicy(StrEnum):
    """What an exception in an episode does."""

    COUNT = "count"
    """Its trajectory fails with the reason; the run goes on."""
    FATAL = "fatal"
    """The worker dies, and the next collect raises."""


class WorkerConfig(BaseModel):
    """How the worker treats slow and failing episodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_trajectory: int = Field(default=4096, ge=1, description="Tokens reserved for a trajectory in flight.")
    episode_timeout_s: float | None = Field(default=None, gt=0, description="Seconds one episode may take.")
    group_reward_timeout_s: float | None = Field(default=None, gt=0, description="Seconds a group reward may take.")
    replace_members: int = Field(default=0, ge=0, description="New tries for a failed member before its group fails.")
    on_error: ErrorPolicy = Field(default=ErrorPolicy.COUNT, description="What an exception in an episode does.")
    max_failures_in_a_row: int = Field(default=64, ge=1, description="Failed groups in a row that end the run.")
    max_filtered_in_a_row: int = Field(default=1024, ge=1, description="Filtered groups in a row that end the run.")
    no_progress_s: float | None = Field(default=1800.0, gt=0, description="Seconds to wait for any progress.")


class EpisodeFailedError(MilesError):
    """An episode in another process raised an error.

    Attributes:
        kind: class name of the error there, under which it is counted.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EpisodeCounts:
    """What episodes came to since the last report."""

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.replaced = 0
        self.wasted_tokens = 0
        self.errors: Counter[str] = Counter()


class EpisodeRunner:
    """Makes groups.

    Args:
        generate: makes the trajectories of one member.
        group_reward: scores whole groups, None where `generate` does.
        config: timeouts and error policy.
        group_size: members of a group.
    """

    def __init__(
        self, *, generate: Generate, group_reward: GroupReward | None, config: WorkerConfig, group_size: int
    ) -> None:
        self._generate = generate
        self._group_reward = group_reward
        self._config = config
        self._size = group_size
        self._counts = EpisodeCounts()

    def take_counts(self) -> EpisodeCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, EpisodeCounts()
        return counts

    async def run(self, task: Task, issue: Issue, *, member_done: Callable[[], None]) -> Group:
        """Run all members of one group.

        Args:
            task: the prompt.
            issue: which try at it.
            member_done: called as each member ends, in whatever way.

        Raises:
            Exception: what an episode raised, under the policy FATAL.
        """
        members = await _gather([self._run_member(task, m, issue, member_done) for m in range(self._size)])
        group = Group(
            prompt_index=issue.prompt_index,
            size=self._size,
            trajectories=tuple(t for member in members for t in member),
            attempt=issue.attempt,
            metadata={"source": task.source, "label": task.label},
        )
        return group if self._group_reward is None or group.failed else await self._score_group(task, group)

    async def _run_member(
        self, task: Task, member: int, issue: Issue, done: Callable[[], None]
    ) -> Sequence[Trajectory]:
        try:
            for attempt in range(issue.attempt, issue.attempt + 1 + self._config.replace_members):
                made = await self._run_episode(task, member, attempt)
                self._counts.finished += 1
                failed = any(t.status in (Status.FAILED, Status.ABORTED) for t in made)
                if not failed:
                    break
                self._counts.failed += 1
                if attempt < issue.attempt + self._config.replace_members:
                    self._counts.replaced += 1
                    self._counts.wasted_tokens += sum(t.num_sampled for t in made)
            return made
        finally:
            done()

    async def _run_episode(self, task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        limit = self._config.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as timeout:
                made = await self._generate(task, member, attempt)
            _check_episode(made, task, member)
            self._counts.errors.update(kind for t in made if (kind := _failure_kind(t)) is not None)
            return made
        except Exception as error:  # task supervisor: what an episode raises fails its trajectory
            if self._config.on_error is ErrorPolicy.FATAL:
                raise
            if isinstance(error, TimeoutError) and timeout.expired():
                kind, reason = "episode_timeout", f"the episode took longer than {limit:g} s"
            else:
                kind = error.kind if isinstance(error, EpisodeFailedError) else type(error).__name__
                known = isinstance(error, EpisodeFailedError)
                reason = f"{kind}: {error}" if known else describe_raised(error, "an episode's generate function")
            self._counts.errors[kind] += 1
            return [failed_trajectory(task, member, attempt, reason)]

    async def _score_group(self, task: Task, group: Group) -> Group:
        assert self._group_reward is not None
        try:
            async with asyncio.timeout(self._config.group_reward_timeout_s):
                result: Any = self._group_reward(task, group.trajectories)
                rewards = list(await result if inspect.isawaitable(result) else result)
            if len(rewards) != len(group.trajectories):
                raise ValueError(f"{len(rewards)} rewards for {len(group.trajectories)} trajectories")
        except Exception as error:  # task supervisor: a foreign group reward fails its group
            if self._config.on_error is ErrorPolicy.FATAL:
                raise
            self._counts.errors["group_reward"] += 1
            reason = f"group reward: {describe_raised(error)}"
            failed = [t.replace(status=Status.FAILED, error=reason) for t in group]
            return msgspec.structs.replace(group, trajectories=tuple(failed))
        scored = []
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            outcome = check_value(reward)
            if outcome.error is not None:
                self._counts.errors["group_reward"] += 1
                scored.append(trajectory.replace(status=Status.FAILED, error=f"group {outcome.error}"))
            else:
                scored.append(trajectory.replace(reward=outcome.value))
        return msgspec.structs.replace(group, trajectories=tuple(scored))


async def _gather(coroutines: Sequence[Awaitable[Sequence[Trajectory]]]) -> list[Sequence[Trajectory]]:
    """Results in order; when one raises, the others are cancelled and awaited first."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _failure_kind(trajectory: Trajectory) -> str | None:
    """Under which a failure that an episode returned is counted; None for a trajectory that did not fail."""
    if trajectory.status not in (Status.FAILED, Status.ABORTED):
        return None
    scoring = (trajectory.error or "").startswith(("reward ", "the reward "))
    return "reward" if scoring else trajectory.status.value


def _check_episode(made: Sequence[Trajectory], task: Task, member: int) -> None:
    if not isinstance(made, Sequence) or not made or not all(isinstance(t, Trajectory) for t in made):
        raise InvalidFieldError("result of generate", made, "return at least one Trajectory")
    for trajectory in made:
        who = (trajectory.identity.prompt_index, trajectory.identity.member)
        if who != (task.prompt_index, member):
            raise InvalidFieldError("identity", who, f"this is prompt {task.prompt_index}, member {member}")
