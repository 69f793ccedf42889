"""The one loop of a run.

    collect a batch -> train on it -> update the engines -> (evaluate) -> record -> (checkpoint)

How far rollout runs ahead of it is a number, the pipeline depth, known only to the admission of new groups: at depth
0 the next batch is started after the update, at depth k up to k batches are under way. There is no second loop for
asynchronous runs.

The driver owns no model and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles_contracts import Group
from miles_loop.audit import EngineRecords
from miles_loop.checkpoint import LoopState, write_checkpoint
from miles_loop.compose import Rollout
from miles_loop.config import RunConfig
from miles_loop.display import Display
from miles_loop.errors import InterruptedRunError
from miles_loop.fleet import Fleet
from miles_loop.measuring import Measurement
from miles_loop.progress import Progress
from miles_loop.recorder import RunRecorder
from miles_loop.records import rollout_record, split_clock
from miles_loop.run_folder import RunFolder
from miles_loop.trainer_client import TrainerClient
from miles_loop.trainer_link import StepDone
from miles_rollout.evaluation import EvalPoint

_log = logging.getLogger(__name__)
T = TypeVar("T")
_RATE_STEPS = 8
"""Steps over which the rate of sampling is taken."""
_STATUS_S = 10.0
"""Seconds between refreshed statuses while the loop waits."""
_BETWEEN_STEPS = "between steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverParts:
    """What the loop drives."""

    folder: RunFolder
    trainer: TrainerClient
    fleet: Fleet
    rollout: Rollout
    records: EngineRecords
    measurement: Measurement | None
    display: Display
    progress: Progress
    process_age_s: Callable[[], float]
    """Seconds since the process started."""


class Driver:
    """Runs the loop from `progress.step` to the last step. `stop_requested` ends it after the current step."""

    def __init__(self, config: RunConfig, parts: DriverParts) -> None:
        self._config = config
        self._parts = parts
        self._progress = parts.progress
        self._recorder = RunRecorder(
            parts.folder,
            config.record,
            parts.progress,
            parts.display,
            tokens_sampled=lambda: parts.records.tokens_sampled,
            engine_restarts=lambda: parts.fleet.restarts,
            failures=lambda: parts.rollout.worker.failures,
            process_age_s=parts.process_age_s,
        )
        self.stop_requested = asyncio.Event()
        self.stopped_by = ""
        self._checkpoint_s: float | None = None
        self._saved_step = self._progress.step
        self._snapshot: LoopState | None = None
        self._restarts_seen = 0
        self._rate_from: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)

    def close(self) -> None:
        """Close the record files."""
        self._recorder.close()

    # -- the loop -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Everything from the first weight update to the last checkpoint.

        Raises:
            InterruptedRunError: stopped on request; a checkpoint of the last finished step was written.
            RunError and other errors of the house: the run cannot go on.
        """
        parts, config, progress = self._parts, self._config, self._progress
        start = progress.step
        if parts.fleet.lockstep is not None:
            scheduler = parts.rollout.scheduler
            parts.fleet.lockstep.in_flight = lambda: scheduler.trajectories_in_flight
        parts.rollout.worker.on_warning = parts.display.note
        self._phase("sending the weights to the engines")
        async with parts.fleet.weights_lock:
            await parts.fleet.update(start)
        progress.begin(start)
        opening: asyncio.Task[None] | None = None
        if self._opening_due(start):
            # Both only need this version; at depth 0 they take turns, so that every batch is made under the same load.
            opening = asyncio.create_task(self._open(start))
            if config.pipeline_depth == 0:
                await opening
        try:
            self._rate_from.append((time.monotonic(), parts.records.tokens_sampled))
            await parts.rollout.worker.start(start)
            for step in range(start + 1, config.steps + 1):
                await self._step(step, opening)
                if self.stop_requested.is_set() and step < config.steps:
                    raise InterruptedRunError(self.stopped_by)
            if config.checkpoint.at_end and self._saved_step != config.steps:
                await self._checkpoint()
            await self._await_points()
        except InterruptedRunError:
            if progress.step > 0 and self._saved_step != progress.step:
                await self._checkpoint()
            raise
        finally:
            if opening is not None:
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)

    async def _step(self, step: int, opening: asyncio.Task[None] | None) -> None:
        parts, config, worker = self._parts, self._config, self._parts.rollout.worker
        started = time.monotonic()
        self._phase("waiting for finished groups")
        batch = await self._unless_stopped(worker.collect(config.rollout.groups_per_step, train_version=step - 1))
        groups = list(batch.groups)
        collected = time.monotonic()
        # Taken now: at depth 0 nothing is in flight, so these figures depend on nothing but the batch.
        rollout_metrics = worker.metrics() | self._fleet_metrics() | parts.rollout.report()
        record = split_clock(rollout_record(groups, parts.rollout.arrived.take()) | rollout_metrics)
        if opening is not None:
            await opening  # it measures a version that the training below replaces
        evaluating = self._evaluation_due(step)
        async with parts.fleet.weights_lock:
            self._phase("training")
            train_started = time.monotonic()
            done = await parts.trainer.train_step(groups)
            worker.confirm(groups)
            trained = time.monotonic()
            self._audit(groups, done, record)
            worker.pause_new(_BETWEEN_STEPS)
            self._phase("updating the engines")
            report = await parts.fleet.update(step)
        parts.records.prune(step - config.max_staleness)
        worker.set_engine_version(step)
        # what depends on the clock is under perf/, so that equal runs have equal records without it
        record |= {(f"perf/{k}" if k.endswith("_s") else f"train/{k}"): v for k, v in done.metrics.items()}
        if report is not None:
            record |= report.metrics()
        if evaluating:
            record |= await self._measure(step)
        now = time.monotonic()
        tokens = sum(group.num_tokens for group in groups)
        record |= {
            "perf/collect_wait_s": collected - started,
            "perf/train_s": trained - train_started,
            "perf/trainer_tokens_per_s": tokens / max(trained - train_started, 1e-9),
            "perf/rollout_tokens_per_s": self._sampling_rate(now),
            "perf/step_s": now - started,
        }
        await self._write(step, record, groups)
        self._write_points(parts.measurement.take(step) if parts.measurement is not None else [])
        # At depth 0 nothing of the next batch exists yet: a run resumed from here cannot be told from this one.
        self._snapshot = self._take_snapshot() if config.pipeline_depth == 0 else None
        worker.resume_new(_BETWEEN_STEPS)
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            await self._checkpoint()

    def _sampling_rate(self, now: float) -> float:
        """Tokens sampled per second over the last steps: answers come in lumps that do not keep to the steps."""
        sampled = self._parts.records.tokens_sampled
        then, before = self._rate_from[0]
        self._rate_from.append((now, sampled))
        return (sampled - before) / max(now - then, 1e-9)

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of `work`, or InterruptedRunError as soon as a stop is requested while it is not there."""
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self.stop_requested.wait())
        try:
            while not (await asyncio.wait((task, stop), timeout=_STATUS_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                self._recorder.waiting()
            if task.done():
                return task.result()
            raise InterruptedRunError(self.stopped_by)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _audit(self, groups: list[Group], done: StepDone, record: dict[str, float]) -> None:
        report = self._parts.records.audit(groups, done.turns, done.routes or None)
        counters = self._progress.counters
        counters["tokens_trained"] += report.tokens_trained
        counters["token_mismatches"] += report.mismatches
        counters["groups_trained"] += len(groups)
        record["rollout/tokens_trained"] = float(report.tokens_trained)
        record["rollout/token_mismatches"] = float(report.mismatches)
        if report.mismatches:
            self._parts.display.note(f"{report.mismatches} trained tokens are not what was sampled: {report.example}")
        if report.routes_audited:
            counters["routes_audited"] += report.routes_audited
            counters["route_mismatches"] += report.route_mismatches
            record["rollout/route_mismatches"] = float(report.route_mismatches)
            record["perf/routing_capture_s"] = self._parts.records.take_capture_s()
        if report.route_mismatches:
            wrong = f"{report.route_mismatches} routing rows are not what the engine chose"
            self._parts.display.note(f"{wrong}: {report.route_example}")

    # -- evaluation ---------------------------------------------------------------------------------------

    def _evaluation_due(self, step: int) -> bool:
        config = self._config.evaluation
        if self._parts.measurement is None:
            return False
        at_end = config.at_end and step == self._config.steps
        return at_end or (config.every > 0 and step > 0 and step % config.every == 0)

    def _opening_due(self, start: int) -> bool:
        """Before the first step when asked for; after a resume when what was due then was not finished."""
        measurement = self._parts.measurement
        if start == 0:
            return measurement is not None and self._config.evaluation.at_start
        missing = all(step != start for step, _ in self._progress.evaluations)
        return measurement is not None and measurement.beside and missing and self._evaluation_due(start)

    async def _open(self, start: int) -> None:
        assert self._parts.measurement is not None
        for point in await self._parts.measurement.measure(start):
            await self._write(start, self._recorder.part_of_step(point), [])

    async def _measure(self, step: int) -> dict[str, float]:
        """Measure the weights of this step, or have them measured; no training answer is started meanwhile."""
        assert self._parts.measurement is not None
        self._phase("evaluating")
        started = time.monotonic()
        record: dict[str, float] = {}
        for point in await self._parts.measurement.measure(step):
            record |= self._recorder.part_of_step(point)
        return record | {"perf/evaluation_s": time.monotonic() - started}

    async def _await_points(self) -> None:
        measurement = self._parts.measurement
        if measurement is not None and measurement.beside:
            self._phase("waiting for evaluations")
            self._write_points(await self._unless_stopped(measurement.finish(self._progress.step)))

    def _write_points(self, points: list[EvalPoint]) -> None:
        for point in points:
            self._recorder.point(point)

    # -- records ------------------------------------------------------------------------------------------

    def _fleet_metrics(self) -> dict[str, float]:
        fleet = self._parts.fleet
        restarts, self._restarts_seen = fleet.restarts - self._restarts_seen, fleet.restarts
        return fleet.routing.take_metrics() | {"router/engine_restarts": float(restarts)}

    async def _write(self, step: int, record: dict[str, float], groups: list[Group]) -> None:
        if self._checkpoint_s is not None:
            record["perf/checkpoint_s"] = self._checkpoint_s
            self._checkpoint_s = None
        await self._recorder.step(step, record, groups)

    def _phase(self, text: str) -> None:
        # The way to the first step is worth a look in the log, each later step is not.
        _log.log(logging.INFO if self._progress.step == 0 else logging.DEBUG, "%s", text)
        self._progress.phase = text
        self._parts.display.phase(self._progress)

    # -- checkpoints --------------------------------------------------------------------------------------

    async def _checkpoint(self) -> Path:
        """Save the run as it is after `progress.step`."""
        parts, progress = self._parts, self._progress
        self._phase("saving a checkpoint")
        started = time.monotonic()
        state = self._snapshot or self._take_snapshot()
        # The records up to this step must be on disk before the checkpoint says that the step is done.
        await asyncio.to_thread(self._recorder.sync)
        path = await write_checkpoint(parts.folder.checkpoints, state, parts.trainer.save, self._config.checkpoint.keep)
        self._checkpoint_s = time.monotonic() - started
        self._saved_step = progress.step
        return path

    def _take_snapshot(self) -> LoopState:
        """What the driver has to remember, at this moment."""
        parts = self._parts
        rollout = parts.rollout.worker.state()
        return LoopState(
            step=self._progress.step,
            rollout=rollout,
            records=parts.records.state([entry.group for entry in rollout.entries]),
            counters=dict(self._progress.counters),
        )
