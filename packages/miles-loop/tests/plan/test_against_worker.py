"""The simulation against the real rollout worker and an engine's real scheduler: the same work, the same steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from plan_cases import RoundsEngine, run_in_simulated_time, workload

from miles_contracts import (
    FilterDecision,
    Group,
    Message,
    Status,
    Task,
    Trajectory,
    TrajectoryIdentity,
    VersionSpan,
)
from miles_loop.plan.engine import EngineRates
from miles_loop.plan.settings import Pipeline, TrainerRates
from miles_loop.plan.simulate import simulate
from miles_loop.plan.workload import RandomWorkload
from miles_rollout.buffer import GroupBuffer
from miles_rollout.ledger import Ledger
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Granularity, Scheduler
from miles_rollout.worker import RolloutWorker, WorkerConfig

RATES = EngineRates(base_s=0.0021, per_sequence_s=0.00037)
STEPS = 25


class Prompts:
    """An endless stream of empty prompts."""

    size = 2**31

    def __init__(self) -> None:
        self._next = 0

    def at(self, prompt_index: int) -> Task:
        return Task(prompt_index=prompt_index, messages=(Message(role="user", content="x"),))

    def next(self) -> Task:
        self._next += 1
        return self.at(self._next - 1)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("not resumed")


async def real_steps(
    pipeline: Pipeline, work: RandomWorkload, trainer: TrainerRates
) -> tuple[list[tuple[float, float]], float]:
    """(seconds, mean staleness) of every step of the driver's loop around the real worker; the engine's idle share."""
    loop = asyncio.get_running_loop()
    engine = RoundsEngine(RATES)
    version = 0

    async def generate(task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        episode = work.episode(task.prompt_index, member, attempt)
        first = last = version
        for number, turn in enumerate(episode.turns):
            first = min(first, version) if number else version
            await engine.answer(turn.sampled)
            last = version
            await asyncio.sleep(turn.delay_s)
        spans = [VersionSpan(start=0, end=1, version=first)]
        spans += [VersionSpan(start=1, end=2, version=last)] if last != first else []
        size = len(spans)
        return [
            Trajectory(
                identity=TrajectoryIdentity(prompt_index=task.prompt_index, member=member, attempt=attempt),
                token_ids=np.zeros(size, np.int32),
                loss_mask=np.ones(size, np.bool_),
                logprobs=np.zeros(size, np.float32),
                version_spans=tuple(spans),
                status=Status.FAILED if episode.fails else Status.FINISHED,
                error="made to fail" if episode.fails else None,
            )
        ]

    def decide(group: Group) -> FilterDecision:
        return FilterDecision(keep=not work.filtered(group.prompt_index, group.attempt), reason="made to")

    worker = RolloutWorker(
        source=Prompts(),
        generate=generate,
        buffer=GroupBuffer(
            max_groups=pipeline.room,
            max_staleness=pipeline.max_staleness,
            group_filter=decide,
            order=pipeline.order,
        ),
        scheduler=Scheduler(
            batch_groups=pipeline.batch_groups,
            group_size=pipeline.group_size,
            depth=pipeline.depth,
            max_trajectories=pipeline.max_in_flight,
            granularity=pipeline.granularity,
        ),
        ledger=Ledger(
            on_failure=pipeline.on_failure,
            on_stale=pipeline.on_stale,
            max_retries=pipeline.max_retries,
            order=pipeline.order,
        ),
        config=WorkerConfig(tokens_per_trajectory=1),
        clock=loop.time,
    )
    await worker.start(0)
    steps = []
    for step in range(1, pipeline.steps + 1):
        began = loop.time()
        batch = await worker.collect(pipeline.batch_groups, train_version=step - 1)
        staleness = worker.metrics()["rollout/fully_async/avg_staleness"]
        await asyncio.sleep(trainer.fixed_s)
        worker.confirm(batch.groups)
        worker.pause_new("update")
        await asyncio.sleep(trainer.prepare_s)
        version = step
        worker.set_engine_version(step)
        await asyncio.sleep(trainer.overhead_s)
        worker.resume_new("update")
        steps.append((loop.time() - began, staleness))
    idle = 1.0 - engine.busy_s / loop.time()
    await worker.close()
    return steps, idle


@pytest.mark.parametrize(
    ("pipeline", "work"),
    [
        (Pipeline(batch_groups=4, group_size=4, depth=0, steps=STEPS, warmup=0), workload()),
        (Pipeline(batch_groups=4, group_size=4, depth=1, steps=STEPS, warmup=0), workload(spread=0.5)),
        (Pipeline(batch_groups=4, group_size=4, depth=3, buffer_groups=5, steps=STEPS, warmup=0), workload(turns=3)),
        (
            Pipeline(batch_groups=4, group_size=3, depth=20, max_in_flight=30, steps=STEPS, warmup=0),
            workload(spread=0.3),
        ),
        (
            Pipeline(
                batch_groups=3,
                group_size=4,
                depth=20,
                max_in_flight=24,
                granularity=Granularity.GROUP,
                max_staleness=3,
                steps=STEPS,
                warmup=0,
            ),
            workload(failure_rate=0.03, filter_rate=0.2, spread=0.3),
        ),
        (
            Pipeline(
                batch_groups=4,
                group_size=4,
                depth=6,
                buffer_groups=6,
                order=TrainingOrder.PROMPT,
                steps=STEPS,
                warmup=0,
            ),
            workload(spread=0.3),
        ),
        (
            Pipeline(
                batch_groups=3,
                group_size=4,
                depth=4,
                max_in_flight=24,
                granularity=Granularity.GROUP,
                max_staleness=2,
                order=TrainingOrder.PROMPT,
                steps=STEPS,
                warmup=0,
            ),
            workload(failure_rate=0.03, filter_rate=0.2, spread=0.3),
        ),
    ],
    ids=[
        "synchronous",
        "one ahead",
        "buffer bound",
        "fully asynchronous",
        "drops and retries",
        "by prompt",
        "by prompt, drops and retries",
    ],
)
def test_the_simulation_makes_the_steps_of_the_real_worker(pipeline: Pipeline, work: RandomWorkload) -> None:
    trainer = TrainerRates(fixed_s=0.3, prepare_s=0.02, overhead_s=0.01)
    real, idle = run_in_simulated_time(real_steps(pipeline, work, trainer))
    made = simulate(pipeline, work, RATES, trainer)
    assert [r.step_s for r in made.records] == pytest.approx([seconds for seconds, _ in real], abs=1e-6)
    assert [r.avg_staleness for r in made.records] == pytest.approx([staleness for _, staleness in real])
    assert made.engine_idle == pytest.approx(idle, abs=1e-3)  # the last round may still be under way
