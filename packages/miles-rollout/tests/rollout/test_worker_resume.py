"""A worker that was killed or whose trainer died goes on without losing or repeating a prompt."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from worker_driving import Policy, build, indices, settle

from miles_contracts import (
    wire,
)
from miles_rollout.scheduler import Granularity
from miles_rollout.worker import RolloutWorker, WorkerState


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
