"""The local runtime: engines and trainer as child processes of this machine, all started at once, all ended together.

What is started is decided before anything is: `engine_spec` and `trainer_spec` are functions of the configuration,
and a runtime for many machines starts the same modules with the same arguments elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_contracts import PauseMode
from miles_loop import trainer_link as link
from miles_loop.audit import EngineRecords
from miles_loop.config import EngineConfig, RunConfig
from miles_loop.errors import ProcessDiedError
from miles_loop.fleet import Fleet, choose_ports
from miles_loop.processes import ChildProcess, ProcessSpec
from miles_loop.run_folder import RunFolder
from miles_loop.trainer_client import TrainerClient
from miles_rollout.engine_client import Deadlines, EngineClient


def engine_spec(config: EngineConfig, index: int, port: int, model: Path) -> ProcessSpec:
    """Process of one embedded engine."""
    arguments = ["--model-path", str(model), "--host", config.host, "--port", str(port), "--dtype", config.dtype]
    arguments += ["--max-running-requests", str(config.max_batch), "--threads", str(config.threads)]
    if config.max_context is not None:
        arguments += ["--context-length", str(config.max_context)]
    return ProcessSpec(
        name=f"engine-{index}",
        module="miles_rollout.engine",
        arguments=(*arguments, *config.extra_args),
        threads=config.threads,
    )


def trainer_spec(config: RunConfig, descriptor: int) -> ProcessSpec:
    """Process of the trainer; `descriptor` is its end of the socket to the driver."""
    return ProcessSpec(
        name="trainer",
        module="miles_loop.trainer_process",
        arguments=(str(descriptor),),
        threads=config.runtime.trainer_threads,
    )


def start_message(config: RunConfig, model: Path, checkpoint: Path | None) -> link.Start:
    """What the trainer process is told first."""
    return link.Start(
        model_path=str(model),
        config=config.trainer.model_dump(mode="json"),
        seed=config.seed,
        shm_directory=str(config.sync.directory),
        bucket_bytes=config.sync.bucket_mib * 2**20,
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


class LocalRuntime:
    """Processes of one run.

    Args:
        config: of the run.
        folder: its folder (logs go there).
        records: for the token audit.
        on_event: told, in words, what happened to processes.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, records: EngineRecords, on_event: Callable[[str], None]
    ) -> None:
        self._config = config
        self._folder = folder
        self._records = records
        self._on_event = on_event
        self._trainer_process: ChildProcess | None = None
        self._engine_processes: list[ChildProcess] = []
        self.trainer: TrainerClient
        self.fleet: Fleet

    async def launch(self, model: Path, *, trainer: bool = True) -> None:
        """Start every process; returns at once, while they load.

        Args:
            model: folder that the engines load (the trainer is told by `load`).
            trainer: False starts engines only, for an evaluation.

        Raises:
            InvalidFieldError: a port that was asked for is taken.
            DiskFullError: no room for the logs.
        """
        config = self._config
        ours, theirs = socket.socketpair()
        try:
            spec = trainer_spec(config, theirs.fileno())
            self._trainer_process = ChildProcess(spec, self._folder.logs / "trainer.log")
            self.trainer = TrainerClient(ours, config.runtime.step_timeout_s)
            engines = self._plan_engines(model)
            self.fleet = Fleet(
                engines,
                source=self.trainer,
                records=self._records,
                mode=PauseMode(config.sync.mode),
                update_deadline_s=config.sync.deadline_s,
                start_timeout_s=config.engine.start_timeout_s,
                restarts=config.engine.restarts,
                on_event=self._on_event,
                # An agent's calls come when its tools are done; there is no clockless order to put them into.
                lockstep=config.pipeline_depth == 0 and config.task.agent is None,
            )
            starting = [process.start() for process in self._engine_processes]
            if trainer:
                starting.append(self._trainer_process.start(pass_fds=(theirs.fileno(),)))
            await asyncio.gather(*starting)
        finally:
            theirs.close()

    def _plan_engines(self, model: Path) -> list[tuple[EngineClient, ChildProcess | None]]:
        config = self._config.engine
        deadlines = Deadlines(generate=self._config.rollout.timeout_s, weights=self._config.sync.deadline_s)
        if config.urls:
            return [(EngineClient(url, deadlines=deadlines), None) for url in config.urls]
        ports = choose_ports(config.host, config.port, config.replicas)
        planned: list[tuple[EngineClient, ChildProcess | None]] = []
        for index, port in enumerate(ports):
            spec = engine_spec(config, index, port, model)
            process = ChildProcess(spec, self._folder.logs / f"{spec.name}.log")
            self._engine_processes.append(process)
            planned.append((EngineClient(f"http://{config.host}:{port}", deadlines=deadlines), process))
        return planned

    async def load(self, start: link.Start) -> int:
        """Wait until the trainer has its model and every engine answers; returns the trainer's version.

        Raises:
            ProcessDiedError, DeadlineExceededError, TrainerFailedError: naming the process, with its log's end.
        """
        trainer = asyncio.create_task(self.trainer.start(start, self._config.engine.start_timeout_s))
        fleet = asyncio.create_task(self.fleet.wait_ready())
        died = asyncio.create_task(self.trainer_died())
        tasks = (trainer, fleet, died)
        try:
            waiting: set[asyncio.Task[Any]] = {trainer, fleet}
            while waiting:
                done, _ = await asyncio.wait({*waiting, died}, return_when=asyncio.FIRST_COMPLETED)
                if died in done:
                    raise died.result()
                for task in done:
                    task.result()
                waiting -= done
            return trainer.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def trainer_died(self) -> ProcessDiedError:
        """Wait until the trainer process ends by itself."""
        assert self._trainer_process is not None
        return await self._trainer_process.died()

    async def stop(self) -> None:
        """End everything; safe to call at any moment after `launch` began."""
        timeout = self._config.runtime.stop_timeout_s
        stopping = []
        if hasattr(self, "trainer"):
            await self.trainer.stop()
        if self._trainer_process is not None:
            stopping.append(self._trainer_process.stop(timeout))
        if hasattr(self, "fleet"):
            stopping.append(self.fleet.close(timeout))
        await asyncio.gather(*stopping)
