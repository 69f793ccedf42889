"""By prompt, what is trained is the stream of prompts in its order, and nothing ever waits for what cannot come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_factories import CountingTasks, group
from worker_driving import PREFIX, Policy, build, indices, settle

from miles_contracts import FilterDecision, Group, InvalidFieldError, wire
from miles_rollout.buffer import GroupBuffer
from miles_rollout.discipline import Discipline
from miles_rollout.ledger import Ledger, UnusedPolicy
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Granularity, Scheduler
from miles_rollout.worker import RolloutWorker, WorkerConfig, WorkerState

PROMPT = TrainingOrder.PROMPT
STEPS = 8
PATIENCE = 3000
"""Rounds of the event loop after which nothing that tests do is still under way."""


def parts(
    *, batch: int = 2, depth: int = 4, max_groups: int = 4, max_bytes: int | None = None, **bounds
) -> tuple[Scheduler, GroupBuffer, Ledger, Discipline]:
    scheduler = Scheduler(batch_groups=batch, group_size=2, depth=depth, **bounds)
    buffer = GroupBuffer(max_groups=max_groups, max_bytes=max_bytes, order=PROMPT)
    ledger = Ledger(on_failure=UnusedPolicy.RETRY, on_stale=UnusedPolicy.RETRY, order=PROMPT)
    return scheduler, buffer, ledger, Discipline(scheduler, buffer, ledger)


def keep(buffer: GroupBuffer, ledger: Ledger, *prompts: int) -> None:
    for prompt in prompts:
        ledger.kept(prompt)
        buffer.put(group(prompt), generation_s=0.0, now=0.0)


# -- collecting -------------------------------------------------------------------------------------------


def test_a_batch_reaches_no_further_than_to_the_first_group_that_is_missing() -> None:
    _, buffer, ledger, line = parts(max_groups=8)
    for prompt in range(6):
        ledger.begin_fresh(prompt)
    keep(buffer, ledger, 3, 0, 2)
    assert line.collect(2, train_version=0, now=0.0, parked=()).groups == (), "1 is still in flight"
    keep(buffer, ledger, 1)
    assert indices(line.collect(2, train_version=0, now=0.0, parked=()).groups) == [0, 1]
    assert line.collect(2, train_version=1, now=0.0, parked=[2]).groups == (), "2 waits for room"
    assert indices(line.collect(2, train_version=1, now=0.0, parked=()).groups) == [2, 3]


def test_younger_weights_do_not_overtake_and_older_ones_neither() -> None:
    buffer = GroupBuffer(max_groups=4, order=PROMPT)
    for prompt, version in ((2, 0), (0, 2), (1, 1)):
        buffer.put(group(prompt, version=version), generation_s=0.0, now=0.0)
    assert indices(buffer.collect(2, train_version=2, now=0.0).groups) == [0, 1]


def test_a_group_that_is_dropped_for_good_is_passed_over_and_a_retried_one_is_not() -> None:
    _, buffer, ledger, line = parts(max_groups=8)
    for prompt in range(4):
        ledger.begin_fresh(prompt)
    keep(buffer, ledger, 2, 3)
    ledger.finished(0)  # filtered
    ledger.failed(1)  # to be tried again
    assert line.collect(2, train_version=0, now=0.0, parked=()).groups == ()
    ledger.begin_waiting()
    ledger.finished(1)
    assert indices(line.collect(2, train_version=0, now=0.0, parked=()).groups) == [2, 3]


def test_stale_groups_come_alone_so_that_the_batch_can_wait_for_their_retry() -> None:
    buffer = GroupBuffer(max_groups=4, max_staleness=0, order=PROMPT)
    for prompt, version in ((0, 0), (1, 1), (2, 1)):
        buffer.put(group(prompt, version=version), generation_s=0.0, now=0.0)
    batch = buffer.collect(2, train_version=1, now=0.0)
    assert (indices(batch.groups), indices(d.group for d in batch.stale)) == ([], [0])
    assert indices(buffer.collect(2, train_version=1, now=0.0).groups) == [1, 2]


# -- room -------------------------------------------------------------------------------------------------


def test_the_buffer_keeps_room_for_the_next_batch() -> None:
    _, buffer, ledger, line = parts(batch=2, max_groups=4)
    for prompt in range(8):
        ledger.begin_fresh(prompt)
    assert line.has_room(group(7))
    keep(buffer, ledger, 7)
    assert line.has_room(group(6))
    keep(buffer, ledger, 6)
    assert not line.has_room(group(5)), "the two that are left are for 0 and 1"
    assert line.has_room(group(1))
    keep(buffer, ledger, 1)
    assert not line.has_room(group(5))
    assert line.has_room(group(0))
    keep(buffer, ledger, 0)
    line.collect(2, train_version=0, now=0.0, parked=())
    assert not line.has_room(group(5))
    assert line.has_room(group(2)), "it is next now"


def test_a_restored_buffer_that_is_too_full_still_takes_what_is_next() -> None:
    _, buffer, ledger, line = parts(batch=2, max_groups=3)
    for prompt in range(8):
        ledger.begin_fresh(prompt)
    keep(buffer, ledger, 4, 5, 6, 7)
    assert not line.has_room(group(3))
    assert line.has_room(group(1))
    keep(buffer, ledger, 1, 0)
    assert indices(line.collect(2, train_version=0, now=0.0, parked=()).groups) == [0, 1]


def test_the_bound_of_bytes_gives_way_to_what_the_trainer_waits_for() -> None:
    _, buffer, ledger, line = parts(batch=2, max_groups=8, max_bytes=group(0).num_bytes)
    for prompt in range(4):
        ledger.begin_fresh(prompt)
    keep(buffer, ledger, 3)
    assert not line.has_room(group(0))
    assert line.has_room(group(0), demand=2)
    assert not line.has_room(group(2), demand=2), "it is in no batch that anybody waits for"


# -- admission --------------------------------------------------------------------------------------------


def test_a_retry_starts_before_new_prompts_in_its_place_and_although_later_groups_wait_for_room() -> None:
    scheduler, _, ledger, line = parts(batch=2, depth=1)
    for prompt in range(4):
        scheduler.start(ledger.begin_fresh(prompt).prompt_index, tokens_each=1)
    assert not line.may_start(parked=(), tokens_each=1), "two batches are under way"
    for prompt in (2, 0):
        ledger.failed(prompt)
        scheduler.group_done(prompt)
    assert [i.prompt_index for i in ledger.waiting] == [0, 2], "in the order of prompts"
    assert line.may_start(parked=[3], tokens_each=1)
    assert ledger.begin_waiting() is not None
    assert line.may_start(parked=[3], tokens_each=1)
    assert not line.may_start(parked=[1], tokens_each=1), "an earlier one waits for room"


def test_admission_is_by_place_and_not_by_what_is_outstanding() -> None:
    scheduler, buffer, ledger, line = parts(batch=2, depth=0, max_groups=8)
    for prompt in range(6):  # more than the depth allows: a resumed run, say
        scheduler.start(ledger.begin_fresh(prompt).prompt_index, tokens_each=1)
        scheduler.group_done(prompt)
    keep(buffer, ledger, 0, 1, 2, 3, 4, 5)
    assert not line.may_start(parked=(), tokens_each=1)
    assert indices(line.collect(2, train_version=0, now=0.0, parked=()).groups) == [0, 1]
    buffer.confirm([group(0), group(1)])
    ledger.finished(0), ledger.finished(1)
    buffer.collect(2, train_version=0, now=0.0)
    ledger.stale(2)
    assert line.may_start(parked=(), tokens_each=1), "2 is next, whatever else there is"


def test_the_parts_agree_on_the_order() -> None:
    scheduler = Scheduler(batch_groups=2, group_size=2)
    with pytest.raises(InvalidFieldError, match=r"ledger\.order.*the buffer's is prompt"):
        Discipline(scheduler, GroupBuffer(max_groups=2, order=PROMPT), Ledger())


# -- the worker -------------------------------------------------------------------------------------------


class Chance:
    """What becomes of each try of a prompt; how long it takes is drawn by another seed."""

    def __init__(self, seed: int, failing: float, filtered: float, slow: int) -> None:
        self.seed, self.failing, self.filtered, self.slow = seed, failing, filtered, slow

    def _draw(self, *what: object) -> float:
        return random.Random("-".join(map(str, (self.seed, *what)))).random()

    def before(self, salt: int):
        async def wait(prompt: int, member: int, attempt: int) -> None:
            for _ in range(int(self._draw("wait", salt, prompt, member, attempt) ** 4 * self.slow)):
                await asyncio.sleep(0)
            if self._draw("fail", prompt, member, attempt) < self.failing:
                raise ValueError("unlucky")

        return wait

    def decide(self, group: Group) -> FilterDecision:
        return FilterDecision(keep=self._draw("keep", group.prompt_index) >= self.filtered, reason="made to")


async def collect(worker: RolloutWorker, count: int, version: int, most: int | None) -> tuple[Group, ...]:
    """A batch; fails at once when the worker stalls, or more than `most` groups wait."""
    task = asyncio.create_task(worker.collect(count, train_version=version))
    for _ in range(PATIENCE):
        if task.done():
            return task.result().groups
        await asyncio.sleep(0)
        assert most is None or worker.metrics()[PREFIX + "queue_size"] <= most
    raise AssertionError(f"no batch for version {version} ever comes: {worker.state().again}")


def make(case: dict, chance: Chance, salt: int, version: int) -> tuple[RolloutWorker, Policy]:
    policy = Policy(chance.before(salt))
    policy.version = version
    unused = {"on_failure": case["on_failure"], "on_stale": case["on_stale"], "max_retries": case["max_retries"]}
    worker = RolloutWorker(
        source=CountingTasks(),
        generate=policy,
        buffer=GroupBuffer(
            max_groups=case["batch"] + case["spare"],
            max_bytes=case["max_bytes"],
            max_staleness=case["max_staleness"],
            group_filter=chance.decide,
            order=PROMPT,
        ),
        scheduler=Scheduler(
            batch_groups=case["batch"],
            group_size=case["size"],
            depth=case["depth"],
            max_trajectories=None if case["flying"] is None else case["size"] + case["flying"],
            granularity=case["granularity"],
        ),
        ledger=Ledger(**unused, order=PROMPT),
        config=WorkerConfig(max_failures_in_a_row=10_000),
    )
    return worker, policy


async def train(case: dict, chance: Chance, salt: int, kill_at: Sequence[int], give_back: int) -> list[list[int]]:
    """Prompts of each step. The driver is killed at the steps `kill_at`, before or after it has collected, and resumed
    with another depth; the trainer dies once, at `give_back`."""
    steps: list[list[int]] = []
    worker, policy = make(case, chance, salt, 0)
    deepest = case["depth"]
    await worker.start(0)
    for step in range(STEPS):
        if step in kill_at:
            if (salt + step) % 3 == 0:
                await collect(worker, case["batch"], step, None)
            await settle(salt % 20)
            frame = wire.encode(worker.state())
            await worker.close()
            case = case | {"depth": (case["depth"] + salt) % 5}
            deepest = max(deepest, case["depth"])
            worker, policy = make(case, chance, salt + step, step)
            worker.restore(wire.decode(frame, WorkerState))
            await worker.start(step)
        # What was restored or given back may be more than the buffer takes in.
        most = None if kill_at or 0 <= give_back <= step else case["batch"] + case["spare"]
        groups = await collect(worker, case["batch"], step, most)
        if step == give_back:
            worker.return_leased()
            await settle(salt % 20)
            groups = await collect(worker, case["batch"], step, None)
        for one in groups:
            assert one.oldest_version is not None
            assert step - one.oldest_version <= deepest, "older than what was admitted"
        await settle(salt % 7)
        worker.confirm(groups)
        steps.append(indices(groups))
        policy.version = step + 1
        worker.set_engine_version(step + 1)
    await worker.close()
    return steps


CASES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 4),
        "size": st.integers(1, 2),
        "depth": st.integers(0, 4),
        "spare": st.integers(0, 6),
        "flying": st.none() | st.integers(0, 8),
        "max_bytes": st.none() | st.integers(1, 2000),
        "max_staleness": st.none() | st.integers(0, 4),
        "granularity": st.sampled_from(Granularity),
        "on_failure": st.sampled_from(UnusedPolicy),
        "on_stale": st.sampled_from(UnusedPolicy),
        "max_retries": st.integers(0, 3),
    }
)
TIGHT = {
    "batch": 2,
    "size": 2,
    "depth": 4,
    "spare": 0,
    "flying": 2,
    "max_bytes": 1,
    "max_staleness": 0,
    "granularity": Granularity.GROUP,
    "on_failure": UnusedPolicy.RETRY,
    "on_stale": UnusedPolicy.RETRY,
    "max_retries": 3,
}
CHANCES = st.builds(
    Chance,
    seed=st.integers(0, 10**6),
    failing=st.sampled_from([0.0, 0.1, 0.4]),
    filtered=st.sampled_from([0.0, 0.3]),
    slow=st.sampled_from([1, 20, 120]),
)


@settings(max_examples=60, deadline=None)
@example(case=TIGHT | {"max_bytes": None}, chance=Chance(1, 0.0, 0.0, 1), salt=20, kill_at=set(), give_back=-1)
@example(case=TIGHT, chance=Chance(1, 0.4, 0.3, 120), salt=3, kill_at={2, 5}, give_back=3)
@given(
    case=CASES,
    chance=CHANCES,
    salt=st.integers(0, 99),
    kill_at=st.sets(st.integers(0, STEPS - 1)),
    give_back=st.integers(0, 9),
)
def test_it_never_stalls_and_trains_in_the_order_of_prompts(
    case: dict, chance: Chance, salt: int, kill_at: set[int], give_back: int
) -> None:
    steps = asyncio.run(train(case, chance, salt, sorted(kill_at), give_back))
    trained = [prompt for step in steps for prompt in step]
    assert len(trained) == STEPS * case["batch"]
    assert trained == sorted(set(trained))


@settings(max_examples=40, deadline=None)
@given(
    case=CASES,
    chance=CHANCES,
    salts=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    kill_at=st.sets(st.integers(0, STEPS - 1)),
)
def test_the_sequence_is_the_same_however_long_groups_take_and_whatever_is_killed(
    case: dict, chance: Chance, salts: tuple[int, int], kill_at: set[int]
) -> None:
    """What is dropped depends on the prompts alone here: no limit of age, and each try always ends alike."""
    case = case | {"max_staleness": None}
    whole = asyncio.run(train(case, chance, salts[0], (), -1))
    killed = asyncio.run(train(case, chance, salts[1], sorted(kill_at), 4))
    assert killed == whole
    other = case | {"depth": (case["depth"] + 2) % 5, "flying": None, "spare": 3}
    assert asyncio.run(train(other, chance, salts[1], (), -1)) == whole, "at any depth and with any bounds"


async def test_by_arrival_nobody_waits_for_a_slow_prompt_and_by_prompt_everybody_does() -> None:
    release = asyncio.Event()

    async def before(prompt: int, member: int, attempt: int) -> None:
        if prompt == 0:
            await release.wait()

    arrival, prompt = build(Policy(before), depth=3), build(Policy(before), depth=3, order=PROMPT)
    for worker in (arrival, prompt):
        await worker.start(0)
    await settle()
    assert indices((await arrival.collect(2, train_version=0)).groups) == [1, 2]
    waiting = asyncio.create_task(prompt.collect(2, train_version=0))
    await settle()
    assert not waiting.done()
    release.set()
    assert indices((await waiting).groups) == [0, 1]
    for worker in (arrival, prompt):
        await worker.close()
