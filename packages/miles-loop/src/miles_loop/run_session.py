"""One run from start to end: folder, model, processes, loop, and what is said when it is over."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from miles_contracts import InvalidFieldError, MilesError
from miles_loop.audit import EngineRecords
from miles_loop.checkpoint import LoopState, clean, newest_checkpoint, read_checkpoint
from miles_loop.config import RunConfig
from miles_loop.display import Display
from miles_loop.errors import DiskFullError, InterruptedRunError, ProcessDiedError, RunError
from miles_loop.models import max_context, resolve_model
from miles_loop.progress import Progress, RunStatus
from miles_loop.recipe import Recipe
from miles_loop.run_folder import RunFolder, read_jsonl, truncate_jsonl
from miles_loop.runtime import Runtime, start_message, worth_a_zygote
from miles_loop.trainer_group import costs_the_trainer
from miles_loop.zygote import Zygote

if TYPE_CHECKING:
    from miles_loop.assembly import Assembly
    from miles_loop.driver import Driver

_log = logging.getLogger(__name__)


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start included (where the system tells)."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            started_ticks = int(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED


_IMPORTED = time.monotonic()


class RunSession:
    """One process's part of a run: all of it, or what is left after a resume."""

    def __init__(
        self, recipe: Recipe, config: RunConfig, folder: RunFolder, display: Display, resumed: LoopState | None
    ) -> None:
        self._recipe = recipe
        self._config = config
        self._folder = folder
        self._display = display
        self._resumed = resumed
        self._checkpoint = newest_checkpoint(folder.checkpoints) if resumed is not None else None
        self._driver: Driver | None = None
        self._signals: list[str] = []
        self.progress = Progress(steps=config.steps)
        if resumed is not None:
            self._restore_progress(resumed)
        self._wall_before_s = self.progress.counters["wall_s"]

    def _restore_progress(self, state: LoopState) -> None:
        self.progress.step = state.step
        self.progress.counters |= state.counters
        for record in read_jsonl(self._folder.metrics_file):
            self.progress.note(record)
        self.progress.time_to_first_step_s = self._folder.read_status().get("time_to_first_step_s")

    async def run(self) -> None:
        """Run to the end, or to the reason why not; `progress` and the run folder say which.

        Raises:
            MilesError: why the run ended early. The status on disk says it too.
        """
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, main)
        try:
            await self._run_until_done()
            self.progress.status = RunStatus.FINISHED
            self.progress.phase = "finished"
        except InterruptedRunError as error:
            self._end(RunStatus.INTERRUPTED, error.reason, str(error))
            raise
        except asyncio.CancelledError:
            early = "" if self.progress.step else " before the first step"
            what = "a second signal" if len(self._signals) > 1 else "".join(self._signals) + early
            self._end(RunStatus.INTERRUPTED, "interrupted", f"stopped at once by {what}")
            raise InterruptedRunError(what) from None
        except MilesError as error:
            self._end(RunStatus.FAILED, reason_of(error), str(error))
            raise
        except BaseException as error:  # recorded in the run's status, then raised on
            self._end(RunStatus.FAILED, "bug", f"{type(error).__name__}: {error}")
            raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            self._write_last_status()

    def _end(self, status: RunStatus, reason: str, message: str) -> None:
        self.progress.status, self.progress.reason, self.progress.message = status, reason, message
        self.progress.phase = str(status)

    def _write_last_status(self) -> None:
        self._folder.release_reserve()
        # On a full disk the reserve has made room; if it is still full, the lock tells readers that we are gone.
        with suppress(DiskFullError, OSError):
            self._folder.write_status(self.progress.to_status())

    def _on_signal(self, number: signal.Signals, main: asyncio.Task[None]) -> None:
        """The first signal asks the loop to stop after its step; the next one stops everything at once."""
        name = signal.Signals(number).name
        self._signals.append(name)
        if len(self._signals) == 1 and self._driver is not None:
            self._display.note(f"{name}: stopping after this step (again: at once)")
            self._driver.stopped_by = name
            self._driver.stop_requested.set()
        else:
            main.cancel()

    async def _run_until_done(self) -> None:
        """The run; a trainer process that is lost costs what came after the newest checkpoint, so often as allowed."""
        restarts_left = self._config.runtime.trainer_restarts
        while True:
            try:
                return await self._run()
            except RunError as error:
                if not costs_the_trainer(error):
                    raise
                checkpoint = newest_checkpoint(self._folder.checkpoints)
                if isinstance(error, ProcessDiedError) and checkpoint is None and self.progress.step:
                    remedy = (
                        "there is no checkpoint to go back to; run with --checkpoint-every N to lose N steps at most"
                    )
                    raise error.advised(remedy) from error
                if not restarts_left or checkpoint is None or self._signals:
                    raise
                restarts_left -= 1
                self._event(f"{error}\ngoing back to {checkpoint}")
                await asyncio.to_thread(self._go_back, checkpoint)

    def _go_back(self, checkpoint: Path) -> None:
        """To the state of a checkpoint, as a resumed run does; engines start anew, too."""
        clean(self._folder.checkpoints)
        state = read_checkpoint(checkpoint)
        rewind(self._folder, state)
        restarts = self.progress.counters["trainer_restarts"] + 1
        self._resumed, self._checkpoint = state, checkpoint
        self.progress = Progress(steps=self._config.steps)
        self._restore_progress(state)
        self.progress.counters |= {"trainer_restarts": restarts, "wall_s": self._wall_before_s}

    async def _run(self) -> None:
        config, folder = self._config, self._folder
        # Before anything else, for it takes longest.
        zygote = Zygote(config.runtime.trainer_threads) if worth_a_zygote(config) else None
        try:
            self._phase("making the model")
            model = await resolve_model(self._recipe, config.model, config.seed, folder.model, self._event)
            records = EngineRecords()
            runtime = Runtime(config, folder, records, self._event, self._recipe.renderer, zygote)
            await self._run_with(runtime, records, model, zygote)
        finally:
            if zygote is not None:
                zygote.close()

    async def _run_with(self, runtime: Runtime, records: EngineRecords, model: Path, zygote: Zygote | None) -> None:
        config = self._config
        try:
            self._phase("starting engines and trainer")
            loading = asyncio.create_task(self._start(runtime, model, zygote))
            try:
                await asyncio.sleep(0)
                # Imported while the processes load: what follows needs the rollout half, they do not.
                from miles_loop.assembly import Assembly

                assembly = await asyncio.to_thread(Assembly, self._recipe, config, model, max_context(model))
                _log.info("tasks, rewards and renderer are ready, after %.2f s", process_age_s())
                version = await loading
                _log.info("engines and trainer are ready, after %.2f s", process_age_s())
            finally:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            if version != self.progress.step:
                raise RunError(
                    "damaged_checkpoint", f"the trainer continues at {version}, the driver at {self.progress.step}"
                )
            await self._drive(assembly, runtime, records, model)
        finally:
            self._phase("ending processes")
            if zygote is not None:
                zygote.close()  # before, so that no start that is given up still waits for it
            await runtime.stop()

    async def _start(self, runtime: Runtime, model: Path, zygote: Zygote | None) -> int:
        """Start all processes and wait until they have loaded; the trainer's version."""
        await runtime.launch(model)
        _log.info("processes are started, %.2f s after this one", process_age_s())
        if zygote is not None:
            zygote.close()  # what is started again later is started in the ordinary way
        checkpoint = None if self._checkpoint is None else self._checkpoint.resolve()
        return await runtime.load(start_message(self._config, model, checkpoint))

    async def _drive(self, assembly: Assembly, runtime: Runtime, records: EngineRecords, model: Path) -> None:
        from miles_loop.driver import Driver, DriverParts
        from miles_loop.measuring import open_measurement

        async with (
            assembly.rollout(runtime.answers) as rollout,
            open_measurement(self._config, assembly, runtime, rollout.worker, self._folder, model) as measurement,
        ):
            if self._resumed is not None:
                rollout.worker.restore(self._resumed.rollout)
                records.restore(self._resumed.records)
            driver = Driver(
                self._config,
                DriverParts(
                    folder=self._folder,
                    trainer=runtime.trainer,
                    fleet=runtime.fleet,
                    rollout=rollout,
                    records=records,
                    measurement=measurement,
                    display=self._display,
                    progress=self.progress,
                    process_age_s=process_age_s,
                ),
            )
            self._driver = driver
            try:
                await self._supervise(driver.run(), runtime)
            finally:
                self._driver = None
                await rollout.worker.close()
                driver.close()

    async def _supervise(self, work: Awaitable[None], runtime: Runtime) -> None:
        """The loop, until it ends or a process that it cannot do without does."""
        loop = asyncio.ensure_future(work)
        trainer_died = asyncio.ensure_future(runtime.trainer_died())
        try:
            await asyncio.wait((loop, trainer_died, runtime.fleet.failed), return_when=asyncio.FIRST_COMPLETED)
            if loop.done() and not runtime.trainer.gone:
                return loop.result()
            # A broken connection is noticed before the dead process is: its death is the better reason.
            await asyncio.wait(
                (trainer_died, runtime.fleet.failed), timeout=runtime.notice_s, return_when=asyncio.FIRST_COMPLETED
            )
            if trainer_died.done():
                raise trainer_died.result()
            if runtime.fleet.failed.done():
                raise runtime.fleet.failed.result()
            return loop.result()
        finally:
            for task in (loop, trainer_died):
                task.cancel()
            await asyncio.gather(loop, trainer_died, return_exceptions=True)

    def _phase(self, text: str) -> None:
        _log.info("%s", text)
        self.progress.phase = text
        self._display.phase(self.progress)

    def _event(self, text: str) -> None:
        _log.warning(text)
        self._display.note(text)


def reason_of(error: MilesError) -> str:
    """Short stable name of an error: its own reason, or its class in snake case."""
    if isinstance(error, RunError):
        return error.reason
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def open_new(config: RunConfig) -> RunFolder:
    """Make and own the folder of a new run.

    Raises:
        InvalidFieldError: something is there already.
        DiskFullError: no room.
    """
    assert config.run_dir is not None
    folder = RunFolder(config.run_dir)
    folder.create(config)
    return folder


def open_resumed(folder: RunFolder, config: RunConfig) -> tuple[LoopState | None, str]:
    """Own the folder of an earlier run and bring it back to its newest checkpoint.

    Returns the state to continue from, None for the start; and what to say when done steps are lost by that. Their
    records are kept beside the new ones.

    Raises:
        InvalidFieldError: another process runs there, or the run has done the steps that are asked for.
        RunError: the checkpoint is damaged.
    """
    folder.lock()
    clean(folder.checkpoints)
    path = newest_checkpoint(folder.checkpoints)
    state = read_checkpoint(path) if path is not None else None
    recorded = max((record["step"] for record in read_jsonl(folder.metrics_file)), default=0)
    done = state.step if state is not None else recorded
    # Without a checkpoint a run that has done all its steps still has to do them again: it has no model to show.
    if done > config.steps or (state is not None and done == config.steps):
        raise InvalidFieldError("steps", config.steps, f"the run has done {done}; ask for more with --steps")
    restarted = ""
    if state is None and recorded:
        kept = folder.set_records_aside()
        restarted = (
            f"no checkpoint in {folder.path}: the run starts again from step 0; the records of the {recorded} steps "
            f"that are lost are in {kept}; --checkpoint-every N keeps steps"
        )
    folder.prepare(config)
    rewind(folder, state)
    return state, restarted


def rewind(folder: RunFolder, state: LoopState | None) -> None:
    """Take back what was recorded after `state`, None for everything."""
    step = state.step if state is not None else 0
    # Without a checkpoint there is nothing before step 1 to keep: the opening evaluation is repeated too.
    last_kept = step if state is not None else -1
    for file in (folder.metrics_file, folder.ledger_file):
        truncate_jsonl(file, last_kept)
    for trajectory in folder.trajectories.glob("step_*.mls"):
        if int(trajectory.stem.removeprefix("step_")) > step:
            trajectory.unlink()
