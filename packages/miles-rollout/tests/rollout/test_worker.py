"""The worker keeps work in flight within its bounds; what is filtered, stale or paused; refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from rollout_factories import CountingTasks
from worker_driving import PREFIX, Policy, build, indices, settle

from miles_contracts import (
    DeadlineExceededError,
    FilterDecision,
    InvalidFieldError,
    Task,
    Trajectory,
)
from miles_rollout.buffer import GroupBuffer
from miles_rollout.ledger import Ledger
from miles_rollout.scheduler import Granularity, Scheduler
from miles_rollout.worker import RolloutWorker, WorkerConfig


async def test_synchronous_loop_trains_every_prompt_in_order() -> None:
    policy = Policy()
    worker = build(policy, batch=3)
    await worker.start(0)
    for version in range(4):
        batch = await worker.collect(3, train_version=version)
        assert indices(batch.groups) == [3 * version, 3 * version + 1, 3 * version + 2]
        assert all(t.oldest_version == version for g in batch.groups for t in g)
        await settle()
        assert policy.running == 0, "nothing may start while the batch is trained"
        worker.confirm(batch.groups)
        policy.version = version + 1
        worker.set_engine_version(version + 1)
    await worker.close()


async def test_depth_one_generates_while_training() -> None:
    policy = Policy()
    worker = build(policy, batch=2, depth=1)
    await worker.start(0)
    first = await worker.collect(2, train_version=0)
    await settle()
    assert len(policy.calls) == 8, "the next batch is made while this one is trained"
    second = await worker.collect(2, train_version=1)
    assert indices((*first.groups, *second.groups)) == [0, 1, 2, 3]
    metrics = worker.metrics()
    assert metrics[PREFIX + "max_staleness"] == 1
    await worker.close()


async def test_in_flight_is_bounded() -> None:
    gate = asyncio.Event()

    async def wait(*_: int) -> None:
        await gate.wait()

    policy = Policy(wait)
    worker = build(policy, batch=10, size=2, max_trajectories=6)
    await worker.start(0)
    await settle()
    assert policy.running == 6
    assert worker.metrics()[PREFIX + "in_flight_trajectories"] == 6
    gate.set()
    assert len((await worker.collect(8, train_version=0)).groups) == 8
    assert policy.most_running <= 6
    await worker.close()


@pytest.mark.parametrize(("granularity", "started"), [(Granularity.SAMPLE, 5), (Granularity.GROUP, 2)])
async def test_stragglers_hold_one_slot_or_their_groups(granularity: Granularity, started: int) -> None:
    gate = asyncio.Event()

    async def straggle(_: int, member: int, __: int) -> None:
        if member == 0:
            await gate.wait()

    policy = Policy(straggle)
    worker = build(policy, batch=10, size=4, max_trajectories=8, granularity=granularity)
    await worker.start(0)
    await settle()
    assert len({prompt for prompt, _, _ in policy.calls}) == started
    await worker.close()


async def test_filtered_prompts_are_never_retried() -> None:
    def odd(group) -> FilterDecision:
        return FilterDecision(keep=group.prompt_index % 2 == 1, reason="even")

    policy = Policy()
    worker = build(policy, retry=True, group_filter=odd)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 3]
    assert len(set(policy.calls)) == len(policy.calls) == 8
    assert worker.metrics()["rollout/dynamic_filter/drop_even"] == 2
    await worker.close()


async def test_stale_prompts_are_retried_under_the_new_version() -> None:
    policy = Policy()
    worker = build(policy, batch=2, depth=3, max_staleness=0, retry=True)
    await worker.start(0)
    first = await worker.collect(2, train_version=0)
    worker.confirm(first.groups)
    await settle()
    policy.version = 1
    worker.set_engine_version(1)
    second = await worker.collect(2, train_version=1)
    assert all(t.oldest_version == 1 for g in second.groups for t in g)
    await settle()
    first_tries = {p for p, _, a in policy.calls if a == 0}
    assert {p for p, _, a in policy.calls if a == 1} == {2, 3, 4, 5, 6, 7} & first_tries
    metrics = worker.metrics()
    assert metrics[PREFIX + "stale_groups_filtered"] == metrics[PREFIX + "retries"] == 6
    await worker.close()


async def test_a_full_buffer_stops_the_producer_and_the_wait_is_measured() -> None:
    times = iter(range(10_000))
    policy = Policy()
    worker = build(policy, batch=2, depth=50, max_groups=3, max_trajectories=4, granularity=Granularity.GROUP)
    worker._clock = lambda: float(next(times))
    await worker.start(0)
    await settle(100)
    started = len({p for p, _, _ in policy.calls})
    assert started == 4, "three in the buffer, one waits for room"
    assert worker.metrics()[PREFIX + "queue_size"] == 3
    collected = await worker.collect(2, train_version=0)
    assert indices(collected.groups) == [0, 1]
    await settle()
    assert worker.metrics()[PREFIX + "producer_wait_seconds"] > 0
    await worker.close()


async def test_pause_lets_running_groups_finish_and_reach_the_buffer() -> None:
    gate = asyncio.Event()

    async def wait(*_: int) -> None:
        await gate.wait()

    policy = Policy(wait)
    worker = build(policy, batch=2, depth=5, max_trajectories=4)
    await worker.start(0)
    await settle()
    worker.pause_new("evaluation")
    worker.pause_new("update")
    with pytest.raises(DeadlineExceededError, match="4 trajectories in flight"):
        await worker.quiesce(deadline_s=0.01)
    gate.set()
    await worker.quiesce(deadline_s=5)
    assert len(policy.calls) == 4
    assert worker.metrics()[PREFIX + "queue_size"] == 2
    worker.resume_new("evaluation")
    await settle()
    assert len(policy.calls) == 4, "the other pause still holds"
    worker.resume_new("update")
    await settle()
    assert len(policy.calls) > 4
    await worker.close()


async def test_group_reward_scores_all_members_together() -> None:
    async def rank(task: Task, members: Sequence[Trajectory]) -> list[float]:
        return [float(i + task.prompt_index) for i in range(len(members))]

    worker = build(Policy(), size=3, group_reward=rank)
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert [[t.reward for t in g] for g in batch.groups] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    await worker.close()


async def test_closing_cancels_everything() -> None:
    async def hang(*_: int) -> None:
        await asyncio.Event().wait()

    policy = Policy(hang)
    worker = build(policy)
    await worker.start(0)
    await settle()
    assert policy.running == 4
    await worker.close()
    assert policy.running == 0


async def test_misuse_is_refused() -> None:
    worker = build(Policy())
    await worker.start(0)
    with pytest.raises(InvalidFieldError, match="start it once"):
        await worker.start(0)
    with pytest.raises(InvalidFieldError, match="restore before start"):
        worker.restore(worker.state())
    await worker.close()
    with pytest.raises(InvalidFieldError, match="one batch has 9 groups"):
        build(Policy(), batch=9, max_groups=8)
    with pytest.raises(InvalidFieldError, match="stride"):
        RolloutWorker(
            source=CountingTasks(),
            generate=Policy(),
            buffer=GroupBuffer(max_groups=4),
            scheduler=Scheduler(batch_groups=2, group_size=1),
            ledger=Ledger(stride=1),
            config=WorkerConfig(replace_members=2),
        )
