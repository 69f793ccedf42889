"""A worker over counted prompts, whose answers tests delay or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout_factories import CountingTasks, trajectory

from miles_contracts import (
    Task,
    Trajectory,
)
from miles_rollout.buffer import GroupBuffer
from miles_rollout.ledger import Ledger, UnusedPolicy
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Granularity, Scheduler
from miles_rollout.worker import RolloutWorker, WorkerConfig

PREFIX = "rollout/fully_async/"


Make = Callable[[Task, int, int], Awaitable[Sequence[Trajectory]]]


class Policy:
    """A Generate whose answers carry the current version; `before` may delay or fail an episode."""

    def __init__(self, before: Callable[[int, int, int], Awaitable[None]] | None = None) -> None:
        self.version = 0
        self.before = before
        self.calls: list[tuple[int, int, int]] = []
        self.running = 0
        self.most_running = 0

    async def __call__(self, task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        self.calls.append((task.prompt_index, member, attempt))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        version = self.version
        try:
            await asyncio.sleep(0)
            if self.before is not None:
                await self.before(task.prompt_index, member, attempt)
        finally:
            self.running -= 1
        return [trajectory(task.prompt_index, member, versions=[version] * 2, reward=float(member), attempt=attempt)]


def build(
    generate: Make,
    *,
    batch: int = 2,
    size: int = 2,
    depth: int = 0,
    max_trajectories: int | None = None,
    granularity: Granularity = Granularity.SAMPLE,
    retry: bool = False,
    max_retries: int = 3,
    max_groups: int = 16,
    max_staleness: int | None = None,
    group_filter=None,
    group_reward=None,
    order: TrainingOrder = TrainingOrder.ARRIVAL,
    **config,
) -> RolloutWorker:
    policy = UnusedPolicy.RETRY if retry else UnusedPolicy.DROP
    stride = 1 + config.get("replace_members", 0)
    return RolloutWorker(
        source=CountingTasks(),
        generate=generate,
        buffer=GroupBuffer(max_groups=max_groups, max_staleness=max_staleness, group_filter=group_filter, order=order),
        scheduler=Scheduler(
            batch_groups=batch,
            group_size=size,
            depth=depth,
            max_trajectories=max_trajectories,
            granularity=granularity,
        ),
        ledger=Ledger(on_failure=policy, on_stale=policy, max_retries=max_retries, stride=stride, order=order),
        group_reward=group_reward,
        config=WorkerConfig(**config),
    )


def indices(groups) -> list[int]:
    return [g.prompt_index for g in groups]


async def settle(rounds: int = 30) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)
