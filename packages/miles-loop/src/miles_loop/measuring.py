"""How a run measures its weights: in place, on the engines that also train, or beside training, from snapshots.

    shared               the loop waits: training answers in flight end first, no new ones are started
    dedicated, external  the loop waits only for the export of a snapshot, or for room among the outstanding ones

What goes wrong in a measurement makes a skipped point with a reason, never the end of a run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from miles_contracts import Evaluator
from miles_loop.assembly import Assembly
from miles_loop.config import EvaluationMode, RunConfig
from miles_loop.evaluation_engines import EvaluationEngines
from miles_loop.hosts import LocalHost
from miles_loop.processes import Process, ProcessSpec, tied
from miles_loop.run_folder import RunFolder
from miles_loop.runtime import Runtime, engine_spec
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.evaluation import (
    DedicatedEvaluator,
    EvalPoint,
    ExternalEvaluator,
    HeldOut,
    Overflow,
    SharedEvaluation,
    SnapshotEvaluation,
)
from miles_rollout.worker import RolloutWorker

_LOOPBACK = "127.0.0.1"


class Measurement(Protocol):
    """What the loop needs of an evaluation."""

    @property
    def beside(self) -> bool:
        """True when points may come after later steps."""

    async def measure(self, version: int) -> list[EvalPoint]:
        """Measure the current weights, which are `version`; returns the points that are known at once."""

    def take(self, version: int) -> list[EvalPoint]:
        """Points finished since the last call; `version` is what the trainer has now."""

    async def finish(self, version: int) -> list[EvalPoint]:
        """Wait for everything outstanding and take it."""


class InPlace:
    """Measures on the run's own engines.

    Args:
        worker: makes training answers on them.
        tasks: what is measured.
        episode_timeout_s: seconds for one answer.
        drain_s: seconds to wait for training answers in flight.
        after: awaited after each measurement.
    """

    beside = False

    def __init__(
        self,
        worker: RolloutWorker,
        tasks: Sequence[HeldOut],
        *,
        episode_timeout_s: float,
        drain_s: float,
        after: Callable[[], Awaitable[None]],
    ) -> None:
        def over(held_up: RolloutWorker | None) -> SharedEvaluation:
            return SharedEvaluation(worker=held_up, tasks=tasks, episode_timeout_s=episode_timeout_s, drain_s=drain_s)

        self._before_training, self._during = over(None), over(worker)
        self._after = after

    async def measure(self, version: int) -> list[EvalPoint]:
        """One point, of exactly this version."""
        # Before the first step the batch that is under way has the same version: nothing has to wait.
        point = await (self._during if version else self._before_training).run(version)
        await self._after()
        point.metrics.pop("eval/duration_seconds", None)  # the loop waits for it and records that under perf/
        return [point]

    def take(self, version: int) -> list[EvalPoint]:
        """Nothing comes later."""
        return []

    async def finish(self, version: int) -> list[EvalPoint]:
        """Nothing is outstanding."""
        return []


class FromSnapshots:
    """Measures snapshots while training goes on. `last` is the version that is never left out."""

    beside = True

    def __init__(self, snapshots: SnapshotEvaluation, last: int) -> None:
        self._snapshots = snapshots
        self._last = last

    async def measure(self, version: int) -> list[EvalPoint]:
        """Export the weights and queue the measurement."""
        await self._snapshots.submit(version, must=version == self._last)
        return []

    def take(self, version: int) -> list[EvalPoint]:
        """What is done."""
        return self._snapshots.take_finished(current_version=version)

    async def finish(self, version: int) -> list[EvalPoint]:
        """Everything."""
        await self._snapshots.drain()
        return self.take(version)


@asynccontextmanager
async def open_measurement(
    config: RunConfig,
    assembly: Assembly,
    runtime: Runtime,
    worker: RolloutWorker,
    folder: RunFolder,
    model: Path,
) -> AsyncIterator[Measurement | None]:
    """The configured way to measure; None when nothing is held out. What is outstanding at the end is cancelled."""
    if config.evaluation.mode is EvaluationMode.EXTERNAL:
        program = ExternalEvaluator(config.evaluation.command, tie=tied)
        async with _snapshots(config, program, runtime, folder) as snapshots:
            yield FromSnapshots(snapshots, config.steps)
        return
    if config.evaluation.mode is EvaluationMode.DEDICATED:
        engines = await _plan_engines(config, folder, model)
        try:
            async with assembly.held_out(engines.router) as tasks:
                if not tasks:
                    yield None
                    return
                evaluator = _on_engines(config, engines, tasks)
                async with _snapshots(config, evaluator, runtime, folder) as snapshots:
                    yield FromSnapshots(snapshots, config.steps)
        finally:
            await engines.close(config.runtime.stop_timeout_s)
        return
    fleet = runtime.fleet

    async def forget() -> None:
        if fleet.routing.in_step:
            # A resumed run does not repeat this evaluation: it must leave nothing that the next batch could find.
            await fleet.flush()

    async with assembly.held_out(runtime.evaluation_answers) as tasks:
        yield (
            InPlace(
                worker,
                tasks,
                episode_timeout_s=config.rollout.timeout_s,
                drain_s=config.runtime.step_timeout_s,
                after=forget,
            )
            if tasks
            else None
        )


@asynccontextmanager
async def _snapshots(
    config: RunConfig, evaluator: Evaluator, runtime: Runtime, folder: RunFolder
) -> AsyncIterator[SnapshotEvaluation]:
    settings = config.evaluation
    shutil.rmtree(folder.snapshots, ignore_errors=True)  # of a run that was killed

    async def export(directory: Path) -> None:
        os.mkdir(directory)
        await runtime.trainer.export_model(directory)

    snapshots = SnapshotEvaluation(
        evaluator=evaluator,
        export=export,
        directory=_absolute(folder.snapshots),
        max_outstanding=settings.max_outstanding,
        overflow=Overflow(settings.overflow),
        keep=settings.keep_snapshots,
        timeout_s=settings.timeout_s,
    )
    try:
        yield snapshots
    finally:
        await snapshots.close()
        if folder.snapshots.is_dir() and not any(folder.snapshots.iterdir()):
            folder.snapshots.rmdir()


def _absolute(folder: Path) -> Path:
    """Engines and programs that load snapshots may run in another folder."""
    return folder.resolve()


def _on_engines(config: RunConfig, engines: EvaluationEngines, tasks: Sequence[HeldOut]) -> Evaluator:
    """Measures a snapshot on engines of its own, started when they do not run."""
    dedicated = DedicatedEvaluator(
        engines=engines.clients,
        router=engines.router,
        tasks=tasks,
        load_s=config.sync.deadline_s,
        episode_timeout_s=config.rollout.timeout_s,
    )

    async def evaluate(version: int, checkpoint: Path | None) -> Mapping[str, float]:
        await engines.ready()
        return await engines.measure(dedicated(version, checkpoint))

    return evaluate


async def _plan_engines(config: RunConfig, folder: RunFolder, model: Path) -> EvaluationEngines:
    """On the driver's machine, where the run folder and so the snapshots are."""
    settings = config.engine
    deadlines = Deadlines(generate=config.rollout.timeout_s, weights=config.sync.deadline_s)
    planned: list[tuple[EngineClient, Process | None]] = [
        (EngineClient(url, deadlines=deadlines), None) for url in config.evaluation.urls
    ]
    if not planned:

        def spec(index: int, host: str, port: int) -> ProcessSpec:
            made = engine_spec(settings.model_copy(update={"host": host}), index, port, model)
            return dataclasses.replace(made, name=f"evaluation-{made.name}")

        host = LocalHost(folder.logs, _LOOPBACK, 0)
        await host.open(engines=config.evaluation.engines, trainer=False)
        planned = [(EngineClient(e.url, deadlines=deadlines), e.process) for e in await host.make_engines(spec)]
    return EvaluationEngines(planned, router=config.router, start_timeout_s=settings.start_timeout_s)
