"""The worker keeps work in flight, counts what fails, dies loudly, and resumes without losing or repeating a prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factories import CountingTasks, trajectory

from miles_contracts import (
    DeadlineExceededError,
    FilterDecision,
    Group,
    InvalidFieldError,
    Status,
    Task,
    Trajectory,
    wire,
)
from miles_rollout.buffer import GroupBuffer
from miles_rollout.ledger import Ledger, UnusedPolicy
from miles_rollout.scheduler import Granularity, Scheduler
from miles_rollout.worker import ErrorPolicy, RolloutDiedError, RolloutWorker, WorkerConfig, WorkerState

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
    **config,
) -> RolloutWorker:
    policy = UnusedPolicy.RETRY if retry else UnusedPolicy.DROP
    stride = 1 + config.get("replace_members", 0)
    return RolloutWorker(
        source=CountingTasks(),
        generate=generate,
        buffer=GroupBuffer(max_groups=max_groups, max_staleness=max_staleness, group_filter=group_filter),
        scheduler=Scheduler(
            batch_groups=batch,
            group_size=size,
            depth=depth,
            max_trajectories=max_trajectories,
            granularity=granularity,
        ),
        ledger=Ledger(on_failure=policy, on_stale=policy, max_retries=max_retries, stride=stride),
        group_reward=group_reward,
        config=WorkerConfig(**config),
    )


def indices(groups) -> list[int]:
    return [g.prompt_index for g in groups]


async def settle(rounds: int = 30) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


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


async def test_a_failed_member_fails_its_group_and_is_counted() -> None:
    async def fail(prompt: int, member: int, _: int) -> None:
        if prompt == 1 and member == 1:
            raise ValueError("tool crashed")

    worker = build(Policy(fail))
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert indices(batch.groups) == [0, 2]
    metrics = worker.metrics()
    assert metrics[PREFIX + "aborted_groups_filtered"] == 1
    assert metrics[PREFIX + "dropped_prompts"] == 1
    assert metrics["rollout/errors/ValueError"] == 1
    assert metrics["rollout/failed_ratio"] == pytest.approx(1 / 6)
    assert metrics[PREFIX + "wasted_tokens"] == 2, "the sibling's tokens"
    await worker.close()


async def test_failed_prompts_are_retried_with_new_attempts_and_then_given_up(caplog) -> None:
    async def fail(prompt: int, _: int, attempt: int) -> None:
        if prompt == 1 or (prompt == 0 and attempt == 0):
            raise ValueError("no")

    policy = Policy(fail)
    worker = build(policy, size=1, retry=True, max_retries=2)
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert [(g.prompt_index, g.attempt) for g in batch.groups] == [(0, 1), (2, 0)]
    assert [a for p, _, a in policy.calls if p == 1] == [0, 1, 2]
    metrics = worker.metrics()
    assert metrics[PREFIX + "retries"] == 3
    assert metrics[PREFIX + "given_up_prompts"] == 1
    assert "prompt 1 is given up after attempt 2: ValueError: no" in caplog.text
    await worker.close()


async def test_a_failed_member_can_be_replaced_alone() -> None:
    async def fail(_: int, member: int, attempt: int) -> None:
        if member == 1 and attempt == 0:
            raise ValueError("no")

    policy = Policy(fail)
    worker = build(policy, replace_members=1)
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert indices(batch.groups) == [0, 1]
    assert [(t.identity.member, t.identity.attempt) for t in batch.groups[0]] == [(0, 0), (1, 1)]
    assert worker.metrics()[PREFIX + "replaced_members"] == 2
    await worker.close()


async def test_a_hanging_episode_is_ended() -> None:
    async def hang(prompt: int, member: int, _: int) -> None:
        if prompt == 0 and member == 0:
            await asyncio.Event().wait()

    worker = build(Policy(hang), episode_timeout_s=0.5)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    assert worker.metrics()["rollout/errors/episode_timeout"] == 1
    await worker.close()


async def test_a_timeout_inside_the_episode_is_not_its_own() -> None:
    async def fail(prompt: int, *_: int) -> None:
        if prompt == 0:
            raise TimeoutError("the tool's own")

    worker = build(Policy(fail), size=1, episode_timeout_s=60)
    await worker.start(0)
    await worker.collect(2, train_version=0)
    assert worker.metrics()["rollout/errors/TimeoutError"] == 1
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


async def test_fatal_errors_kill_the_worker_even_when_the_buffer_holds_a_batch() -> None:
    async def fail(prompt: int, *_: int) -> None:
        if prompt == 2:
            raise ValueError("broken environment")

    worker = build(Policy(fail), depth=1, on_error=ErrorPolicy.FATAL)
    await worker.start(0)
    await settle()
    with pytest.raises(RolloutDiedError, match="group-2 failed: ValueError: broken environment") as caught:
        await worker.collect(2, train_version=0)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RolloutDiedError):
        await worker.quiesce()
    await worker.close()


async def test_a_waiting_collect_hears_of_the_death() -> None:
    async def fail(prompt: int, *_: int) -> None:
        if prompt == 1:
            await asyncio.sleep(0.01)
            raise ValueError("late")

    worker = build(Policy(fail), on_error=ErrorPolicy.FATAL)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="late"):
        await worker.collect(2, train_version=0)
    await worker.close()


async def test_failing_for_ever_ends_with_the_reason() -> None:
    async def fail(*_: int) -> None:
        raise ConnectionError("no engine")

    worker = build(Policy(fail), max_failures_in_a_row=5)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="5 groups in a row failed; the last: ConnectionError: no engine"):
        await worker.collect(2, train_version=0)
    await worker.close()


async def test_filtering_for_ever_warns_and_ends_with_reasons_and_remedies() -> None:
    def decide(group: Group) -> FilterDecision:
        return FilterDecision(keep=False, reason="odd" if group.prompt_index % 2 else "even")

    worker = build(Policy(), group_filter=decide, max_filtered_in_a_row=16)
    told: list[str] = []
    worker.on_warning = told.append
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="dropped 16 groups in a row and kept none") as caught:
        await worker.collect(2, train_version=0)
    await worker.close()
    for expected in ("odd: 8", "even: 8", "mean 0.5, from 0 to 1", "temperature", "group_size", "rollout.filter"):
        assert expected in str(caught.value)
    assert len(told) == 7, "after each eighth of the bound but the last"
    assert "dropped 2 groups in a row" in told[0]


async def test_a_kept_group_ends_a_streak_of_filtered_ones() -> None:
    def decide(group: Group) -> FilterDecision:
        return FilterDecision(keep=group.prompt_index % 8 == 7, reason="dull")

    worker = build(Policy(), batch=4, group_filter=decide, max_filtered_in_a_row=16)
    await worker.start(0)
    batch = await worker.collect(4, train_version=0)
    assert indices(batch.groups) == [7, 15, 23, 31], "28 were filtered, never 16 in a row"
    await worker.close()


async def test_a_broken_source_or_filter_ends_the_run() -> None:
    worker = build(Policy())
    worker._source.next = lambda: 1 / 0
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="task source failed: ZeroDivisionError"):
        await worker.collect(2, train_version=0)
    worker = build(Policy(), group_filter=lambda g: 1 / 0)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="ZeroDivisionError"):
        await worker.collect(2, train_version=0)
    await worker.close()


async def test_no_progress_is_reported() -> None:
    async def hang(*_: int) -> None:
        await asyncio.Event().wait()

    worker = build(Policy(hang), no_progress_s=0.05)
    await worker.start(0)
    with pytest.raises(DeadlineExceededError, match=r"4 trajectories in flight, 0 groups ready"):
        await worker.collect(2, train_version=0)
    await worker.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda task, member: [],
        lambda task, member: [trajectory(task.prompt_index + 1, member)],
        lambda task, member: [trajectory(task.prompt_index, member + 1)],
        lambda task, member: "nonsense",
        lambda task, member: None,
    ],
)
async def test_a_generate_that_returns_nonsense_fails_its_member(make) -> None:
    async def generate(task: Task, member: int, attempt: int):
        return make(task, member) if task.prompt_index == 0 else [trajectory(task.prompt_index, member)]

    worker = build(generate)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    assert worker.metrics()["rollout/errors/InvalidFieldError"] == 2
    await worker.close()


async def test_group_reward_scores_all_members_together() -> None:
    async def rank(task: Task, members: Sequence[Trajectory]) -> list[float]:
        return [float(i + task.prompt_index) for i in range(len(members))]

    worker = build(Policy(), size=3, group_reward=rank)
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert [[t.reward for t in g] for g in batch.groups] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    await worker.close()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [([1.0], "1 rewards for 2"), ([1.0, float("nan")], "nan"), ([1.0, "good"], "str"), (None, "TypeError")],
)
async def test_a_bad_group_reward_fails_its_group(rewards, message: str) -> None:
    reasons = []

    def bad(task: Task, members: Sequence[Trajectory]):
        return rewards if task.prompt_index == 0 else [0.0] * len(members)

    worker = build(Policy(), group_reward=bad)
    judge = worker._buffer.judge
    worker._buffer.judge = lambda g: reasons.extend(t.error for t in g) or judge(g)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    assert any(message in (e or "") for e in reasons)
    assert worker.metrics()["rollout/errors/group_reward"] >= 1
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


async def test_a_batch_of_a_dead_trainer_is_offered_again() -> None:
    worker = build(Policy())
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    worker.return_leased()
    assert indices((await worker.collect(2, train_version=0)).groups) == indices(batch.groups)
    await worker.close()


async def _train(worker: RolloutWorker, policy: Policy, trained: list, version: int, until: int, batch: int) -> None:
    await worker.start(version)
    for step in range(version, until):
        groups = (await worker.collect(batch, train_version=step)).groups
        worker.confirm(groups)
        trained.append([(g.prompt_index, g.attempt, [t.identity.attempt for t in g]) for g in groups])
        policy.version = step + 1
        worker.set_engine_version(step + 1)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(0, 3),
    kill_at=st.integers(0, 4),
    rounds=st.integers(0, 12),
    retry=st.booleans(),
)
def test_kill_and_resume_loses_none_and_trains_none_twice(
    seed: int, depth: int, kill_at: int, rounds: int, retry: bool
) -> None:
    def delays(salt: int):
        async def before(prompt: int, member: int, attempt: int) -> None:
            random_ = random.Random(f"{seed}-{salt}-{prompt}-{member}-{attempt}")
            for _ in range(random_.randrange(8)):
                await asyncio.sleep(0)
            if random.Random(f"{seed}-{prompt}-{member}-{attempt}").random() < 0.15:
                raise ValueError("unlucky")

        return before

    def make(salt: int) -> tuple[RolloutWorker, Policy]:
        policy = Policy(delays(salt))
        policy.version = kill_at if salt else 0
        return build(policy, batch=3, depth=depth, retry=retry, max_groups=16, max_retries=50), policy

    async def scenario() -> tuple[list, list]:
        trained: list = []
        worker, policy = make(0)
        await _train(worker, policy, trained, 0, kill_at, 3)
        await settle(rounds)
        frame = wire.encode(worker.state())
        await worker.close()
        assert len(wire.encode(worker.state())) > 0
        worker, policy = make(1)
        worker.restore(wire.decode(frame, WorkerState))
        await _train(worker, policy, trained, kill_at, kill_at + 3, 3)
        await worker.quiesce(deadline_s=10)
        rest = worker.state()
        await worker.close()

        whole: list = []
        worker, policy = make(0)
        await _train(worker, policy, whole, 0, kill_at + 3, 3)
        await worker.close()

        prompts = [p for step in trained for p, _, _ in step]
        assert len(set(prompts)) == len(prompts), "trained twice"
        left = {e.group.prompt_index for e in rest.entries} | {i.prompt_index for i in rest.again}
        assert not left & set(prompts)
        if retry:  # nothing is ever dropped, so every prompt the source gave is trained or still on its way
            assert sorted(left | set(prompts)) == list(range(rest.source["next"]))
        return trained, whole

    trained, whole = asyncio.run(scenario())
    if depth == 0:
        assert trained == whole, "a synchronous run resumes to exactly the batches it would have had"


async def test_state_of_a_closed_worker_still_has_groups_that_waited_for_room() -> None:
    worker = build(Policy(), batch=2, depth=50, max_groups=3, max_trajectories=4, granularity=Granularity.GROUP)
    await worker.start(0)
    await settle(100)
    before = worker.state()
    await worker.close()
    after = worker.state()
    assert [e.group.prompt_index for e in after.entries] == [e.group.prompt_index for e in before.entries]
    assert sorted(e.group.prompt_index for e in after.entries) == [0, 1, 2, 3]
    assert after.again == ()


async def test_aborted_trajectories_are_failures() -> None:
    async def generate(task: Task, member: int, attempt: int) -> list[Trajectory]:
        status = Status.ABORTED if task.prompt_index == 0 else Status.FINISHED
        return [trajectory(task.prompt_index, member, status=status)]

    worker = build(generate)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    await worker.close()
