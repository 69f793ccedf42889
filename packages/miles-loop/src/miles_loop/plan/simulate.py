"""The whole pipeline in simulated time: one queue of events, one trainer that goes through the driver's step.

collect a batch -> train -> (hold new groups) prepare the update -> pause engines -> resume with new weights -> go on
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from miles_contracts import Group, MilesError
from miles_loop.plan.engine import EngineRates
from miles_loop.plan.outcome import Outcome, StepRecord
from miles_loop.plan.rollout import Action, SimRollout
from miles_loop.plan.settings import Pipeline, TrainerRates
from miles_loop.plan.workload import Workload

_HOPELESS = 50
"""Groups started for each that is needed, above which nothing will come of it."""


class PlanError(MilesError):
    """The pipeline that was asked for cannot run; the message says why."""


class _Kind(IntEnum):
    """What an event is; at equal times the lower comes first."""

    ENGINE = 0
    ACTION = 1
    TRAINED = 2
    PAUSE = 3
    RESUME = 4
    STEP_DONE = 5


@dataclass(slots=True)
class _Step:
    """The step that the trainer is in."""

    number: int
    began: float
    wait_s: float = 0.0
    train_s: float = 0.0
    tokens: int = 0
    groups: tuple[Group, ...] = ()
    waiting: bool = True


class Simulation:
    """One run.

    Args:
        pipeline: shape of the run.
        workload: what trajectories ask for.
        engine: rates of each engine.
        trainer: rates of the trainer; None throws batches away as they come (rollout alone), under weights that
            never change.
    """

    def __init__(
        self, pipeline: Pipeline, workload: Workload, engine: EngineRates, trainer: TrainerRates | None
    ) -> None:
        self._pipeline = pipeline
        self._trainer = trainer or TrainerRates(fixed_s=0.0)
        self._train = trainer is not None
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._rollout = SimRollout(pipeline, workload, engine, self._later)
        self._epochs = [0] * pipeline.engines
        self._step = _Step(1, 0.0)
        self._records: list[StepRecord] = []
        self._measured_from = 0.0
        self._busy_from = 0.0
        self.largest_buffer = 0
        """Most finished groups that ever waited at the same time."""

    def run(self) -> Outcome:
        """Simulate all steps.

        Raises:
            PlanError: nothing can happen any more, or next to nothing is ever kept.
        """
        rollout = self._rollout
        rollout.fill(0.0)
        self._begin_step()
        handlers: dict[_Kind, Callable[[Any], None]] = {
            _Kind.ENGINE: self._engine,
            _Kind.ACTION: self._act,
            _Kind.TRAINED: self._trained,
            _Kind.PAUSE: self._pause,
            _Kind.RESUME: self._resume,
            _Kind.STEP_DONE: self._step_done,
        }
        limit = _HOPELESS * self._pipeline.batch_groups * (self._pipeline.steps + self._pipeline.depth + 1)
        while len(self._records) < self._pipeline.steps:
            self._follow_engines()
            if not self._events:
                raise PlanError(f"step {self._step.number} never gets its batch: nothing is in flight")
            time, kind, _, payload = heapq.heappop(self._events)
            self._now = time
            handlers[_Kind(kind)](payload)
            self.largest_buffer = max(self.largest_buffer, len(rollout.buffer))
            if self._step.waiting:
                self._try_collect()
            if rollout.counts["started"] > limit:
                raise PlanError(
                    f"{rollout.counts['started']} groups were started for {rollout.counts['trained']} trained ones; "
                    "lower failure_rate or filter_rate, or raise max_staleness"
                )
        return self._outcome()

    # -- events -------------------------------------------------------------------------------------------

    def _at(self, time: float, kind: _Kind, payload: Any = None) -> None:
        heapq.heappush(self._events, (time, int(kind), next(self._order), payload))

    def _later(self, time: float, action: Action) -> None:
        self._at(time, _Kind.ACTION, action)

    def _follow_engines(self) -> None:
        """Plan the next event of every engine that was touched; what was planned before is void."""
        touched = self._rollout.touched
        for number in sorted(touched):
            self._epochs[number] += 1
            time = self._rollout.engines[number].next_event()
            if time < float("inf"):
                self._at(max(time, self._now), _Kind.ENGINE, (number, self._epochs[number]))
        touched.clear()

    def _engine(self, payload: tuple[int, int]) -> None:
        number, epoch = payload
        if epoch != self._epochs[number]:
            return
        engine = self._rollout.engines[number]
        engine.advance(self._now)
        for request in engine.finished():
            self._rollout.sampled(request, self._now)
        self._rollout.touched.add(number)

    def _act(self, action: Action) -> None:
        action(self._now)

    # -- the trainer --------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._step = _Step(len(self._records) + 1, self._now)
        self._rollout.wanted_by(self._step.number - 1, self._now)
        self._try_collect()

    def _try_collect(self) -> None:
        step = self._step
        found = self._rollout.collect(step.number - 1, self._now)
        if found is None:
            return
        batch, step.tokens = found
        step.groups, step.waiting = batch.groups, False
        step.wait_s = self._now - step.began
        step.train_s = self._trainer.train_s(step.tokens)
        self._at(self._now + step.train_s, _Kind.TRAINED)

    def _trained(self, _: None) -> None:
        self._rollout.confirm(self._step.groups)
        self._rollout.hold(True)
        self._at(self._now + self._trainer.prepare_s, _Kind.PAUSE)

    def _pause(self, _: None) -> None:
        if self._train:
            self._rollout.pause(self._now)
        self._at(self._now + self._trainer.pause_s, _Kind.RESUME)

    def _resume(self, _: None) -> None:
        if self._train:
            self._rollout.resume(self._step.number, self._now)
        self._rollout.scheduler.set_versions(engine=self._step.number)
        self._at(self._now + self._trainer.overhead_s, _Kind.STEP_DONE)

    def _step_done(self, _: None) -> None:
        rollout, step = self._rollout, self._step
        figures = rollout.buffer.metrics()
        prefix = "rollout/fully_async/"
        self._records.append(
            StepRecord(
                step_s=self._now - step.began,
                wait_s=step.wait_s,
                train_s=step.train_s,
                tokens=step.tokens,
                avg_staleness=figures[prefix + "avg_staleness"],
                max_staleness=figures[prefix + "max_staleness"],
                queue_size=figures[prefix + "queue_size"],
                in_flight=rollout.scheduler.trajectories_in_flight,
                generation_s=figures[prefix + "generation_seconds"],
            )
        )
        if len(self._records) == self._pipeline.warmup:
            self._measured_from, self._busy_from = self._now, self._busy_s()
        rollout.hold(False)
        rollout.fill(self._now)
        if len(self._records) < self._pipeline.steps:
            self._begin_step()

    # -- the end ------------------------------------------------------------------------------------------

    def _busy_s(self) -> float:
        for engine in self._rollout.engines:
            engine.advance(self._now)
        return sum(engine.busy_s for engine in self._rollout.engines)

    def _outcome(self) -> Outcome:
        rollout, pipeline = self._rollout, self._pipeline
        counts = dict(rollout.counts)
        counts["in_flight"] = rollout.groups_in_flight
        counts["buffered"] = len(rollout.buffer) + rollout.parked
        counts["leased"] = rollout.buffer.leased
        wall = self._now - self._measured_from
        busy = self._busy_s() - self._busy_from
        prompt = rollout.prefill_tokens + rollout.cached_tokens
        return Outcome(
            records=tuple(self._records[pipeline.warmup :]),
            wall_s=wall,
            engine_idle=1.0 - busy / (wall * pipeline.engines) if wall > 0 else 0.0,
            prefix_hit_rate=rollout.cached_tokens / prompt if prompt else 0.0,
            trajectories_per_batch=pipeline.batch_groups * pipeline.group_size,
            groups=counts,
            largest_buffer=self.largest_buffer,
        )


def simulate(pipeline: Pipeline, workload: Workload, engine: EngineRates, trainer: TrainerRates | None) -> Outcome:
    """Run one simulation; equal arguments give equal outcomes.

    Raises:
        PlanError: the pipeline cannot run.
        InvalidFieldError: values that contradict each other.
    """
    return Simulation(pipeline, workload, engine, trainer).run()
