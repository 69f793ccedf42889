"""Engines and trainer of a run: all started at once, all ended together.

What is started is decided before anything is: `engine_spec` and `trainer_spec` are functions of the configuration.
Where it is started is a host's business (`miles_loop.hosts`): child processes of this machine, or a Ray cluster.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, PauseMode
from miles_loop import trainer_link as link
from miles_loop.audit import EngineRecords
from miles_loop.config import EngineConfig, RouterKind, RunConfig, RuntimeKind
from miles_loop.errors import ProcessDiedError
from miles_loop.fleet import Fleet
from miles_loop.gateway import Gateway, gateway_spec, require_router
from miles_loop.hosts import Host, LocalHost
from miles_loop.late import PROCESS_LATE_S, said_when_late
from miles_loop.models import num_experts, num_layers
from miles_loop.ports import choose_ports
from miles_loop.processes import Process, ProcessSpec
from miles_loop.rollout_workers import RolloutWorkers, rollout_spec
from miles_loop.rollout_workers import start_message as rollout_start
from miles_loop.run_folder import RunFolder
from miles_loop.serving import ServingChild
from miles_loop.sglang_engine import require_sglang, sglang_spec
from miles_loop.sync_parts import canary_of, engine_module, make_transport, sender_settings
from miles_loop.trainer_client import TrainerClient
from miles_loop.trainer_group import TRAINER, TrainerGroup, rank_name
from miles_loop.zygote import MODULES, Zygote, can_fork
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.engine_identity import EngineKind
from miles_rollout.router import Router


def engine_spec(
    config: EngineConfig, index: int, port: int, model: Path, module: str = "miles_rollout.engine"
) -> ProcessSpec:
    """Process of one engine; `module` is what an embedded one runs."""
    if config.kind is EngineKind.SGLANG:
        return sglang_spec(config, index, port, model)
    arguments = ["--model-path", str(model), "--host", config.host, "--port", str(port), "--dtype", config.dtype]
    arguments += ["--max-running-requests", str(config.max_batch), "--threads", str(config.threads)]
    if config.max_context is not None:
        arguments += ["--context-length", str(config.max_context)]
    return ProcessSpec(
        name=f"engine-{index}",
        module=module,
        arguments=(*arguments, *config.extra_args),
        threads=config.threads,
        environment=config.environment,
        python=config.python,
    )


def trainer_spec(config: RunConfig, rank: int, where: str) -> ProcessSpec:
    """Process of a trainer rank; `where` is how it reaches the driver (see `trainer_server.serve_process`)."""
    return ProcessSpec(
        name=rank_name(rank),
        module="miles_loop.trainer_process",
        arguments=(where,),
        threads=config.runtime.trainer_threads,
    )


def start_message(config: RunConfig, model: Path, checkpoint: Path | None) -> link.Start:
    """What the trainer process is told first."""
    return link.Start(
        model_path=str(model),
        config=config.trainer.model_dump(mode="json"),
        seed=config.seed,
        sender=sender_settings(config),
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


def require_runtime(config: RunConfig) -> None:
    """Refuse a runtime, or an engine on this machine, that is not installed.

    Raises:
        InvalidFieldError: with what to install.
    """
    if config.runtime.kind is RuntimeKind.RAY and importlib.util.find_spec("ray") is None:
        raise InvalidFieldError("runtime.kind", "ray", "Ray is not installed: pip install 'miles-loop[ray]'")
    here = config.runtime.kind is RuntimeKind.LOCAL and not config.engine.urls
    if here and config.engine.kind is EngineKind.SGLANG:
        require_sglang(config.engine)


def worth_a_zygote(config: RunConfig) -> bool:
    """Whether a run has two processes or more here that a zygote can fork.

    With several threads none can be: numerical libraries start theirs when they are imported, and a fork lacks them.
    """
    if config.runtime.kind is not RuntimeKind.LOCAL or not config.runtime.share_imports or not can_fork():
        return False
    engine = config.engine
    embedded = engine.kind is EngineKind.EMBEDDED and not engine.urls and engine_module(config) in MODULES
    ranks = config.runtime.trainer_ranks if config.runtime.trainer_threads == 1 else 0
    return bool(ranks) and ranks + (engine.replicas if embedded and engine.threads == 1 else 0) > 1


def make_host(
    config: RunConfig, folder: RunFolder, model: Path, on_event: Callable[[str], None], zygote: Zygote | None = None
) -> Host:
    """Where the configuration wants the processes; Ray is only imported when it is chosen.

    Raises:
        InvalidFieldError: settings that have no meaning there.
    """
    if config.runtime.kind is RuntimeKind.RAY:
        require_runtime(config)
        from miles_loop.ray_runtime.host import RayHost

        return RayHost(config, folder, model, on_event)
    # SGLang's router knows engines by the addresses of their first start.
    moves = config.engine.router is RouterKind.OWN
    return LocalHost(folder.logs, config.engine.host, config.engine.port, moves=moves, zygote=zygote)


class Runtime:
    """Processes of one run.

    Args:
        config: of the run.
        folder: its folder (logs go there).
        records: for the token audit.
        on_event: told, in words, what happened to processes.
        renderer: name of the family's renderer, for rollout workers.
        zygote: forks the processes that it can; it is wanted until `launch` has returned.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        records: EngineRecords,
        on_event: Callable[[str], None],
        renderer: str = "auto",
        zygote: Zygote | None = None,
    ) -> None:
        self._config = config
        self._zygote = zygote
        self._renderer = renderer
        self._folder = folder
        self._records = records
        self._on_event = on_event
        self._host: Host | None = None
        self._trainers: TrainerGroup | None = None
        self._clients: list[EngineClient] = []
        self._routing = False
        self.trainer: TrainerClient
        self.fleet: Fleet
        self.workers: RolloutWorkers | None = None
        """Make the answers; None where this process does."""

    async def launch(self, model: Path, *, trainer: bool = True) -> None:
        """Start every process; returns while they load.

        Args:
            model: folder that the engines load (the trainer is told by `load`).
            trainer: False starts engines only, for an evaluation.

        Raises:
            InvalidFieldError: a port that was asked for is taken; no Ray cluster at the address; a router that is
                not there or cannot do what the run needs.
            RunError: `no_room` on the cluster.
            DiskFullError: no room for the logs.
        """
        config = self._config
        self._routing = trainer and config.trainer.replay.enabled and num_experts(model) is not None
        require_router(config, routing=self._routing)
        host = self._host = make_host(config, self._folder, model, self._on_event, self._zygote)
        replicas = 0 if config.engine.urls else config.engine.replicas
        await host.open(engines=replicas, trainer=trainer, workers=config.rollout_workers)
        made = [host.make_trainer(rank, partial(trainer_spec, config)) for rank in range(config.runtime.trainer_ranks)]
        self._trainers = TrainerGroup(made, config.runtime.step_timeout_s)
        self.trainer = self._trainers.client
        engines = await self._make_engines(host, model)
        self._clients = [client for client, _ in engines]
        gateway = self._make_gateway() if config.engine.router is RouterKind.SGLANG else None
        # An agent's calls come when its tools are done, and SGLang's router takes them one by one: there is no
        # clockless order to put them into. Nor is there one between several rollout workers.
        lockstep = config.pipeline_depth == 0 and config.task.agent is None and gateway is None
        if config.rollout_workers:
            self.workers = self._make_workers(host, model, lockstep=lockstep and config.rollout_workers == 1)
        self.fleet = Fleet(
            engines,
            source=self.trainer,
            transport=make_transport(config, self.trainer, model),
            canary=canary_of(config),
            records=self._records,
            mode=PauseMode(config.sync.mode),
            update_deadline_s=config.sync.deadline_s,
            start_timeout_s=config.engine.start_timeout_s,
            restarts=config.engine.restarts,
            on_event=self._on_event,
            router=config.router,
            gateway=gateway,
            hang_s=config.engine.hang_s,
            lockstep=lockstep,
            routing=self.workers,
        )
        if self.workers is not None:
            self.workers.on_failed = self.fleet.fail
            self.workers.launch()
        starting = [process.start() for _, process in engines if process is not None]
        if gateway is not None:
            starting.append(gateway.process.start())
        if trainer:
            starting.append(self._trainers.start())
        await asyncio.gather(*starting)

    def _make_workers(self, host: Host, model: Path, *, lockstep: bool) -> RolloutWorkers:
        config = self._config
        return RolloutWorkers(
            lambda index: host.make_worker(index, partial(rollout_spec, config)),
            config.rollout_workers,
            start=rollout_start(config, self._renderer, model, lockstep=lockstep),
            engines=[(client.url, client.address) for client in self._clients],
            records=self._records,
            config=config,
            notice_s=host.notice_s,
            on_event=self._on_event,
        )

    @property
    def answers(self) -> Router | RolloutWorkers:
        """What makes the answers of training."""
        return self.workers or self.fleet.router

    @property
    def evaluation_answers(self) -> Router | RolloutWorkers:
        """What makes the answers of evaluation on the run's own engines."""
        return self.workers or self.fleet.evaluation_router

    def _make_gateway(self) -> Gateway:
        config = self._config
        here = "127.0.0.1"
        process = ServingChild(
            lambda ports: gateway_spec(here, *ports), self._folder.logs / "router.log", choose_ports(here, 0, 2)
        )
        return Gateway(
            process,
            deadlines=Deadlines(generate=config.rollout.timeout_s),
            start_timeout_s=config.engine.start_timeout_s,
            restarts=config.engine.restarts,
            on_event=self._on_event,
        )

    async def _make_engines(self, host: Host, model: Path) -> list[tuple[EngineClient, Process | None]]:
        config = self._config.engine
        deadlines = Deadlines(generate=self._config.rollout.timeout_s, weights=self._config.sync.deadline_s)
        layers = num_layers(model)
        if config.urls:
            return [(EngineClient(url, deadlines=deadlines, routing_layers=layers), None) for url in config.urls]

        module = engine_module(self._config)

        def spec(index: int, address: str, port: int) -> ProcessSpec:
            return engine_spec(config.model_copy(update={"host": address}), index, port, model, module)

        made = await host.make_engines(spec)
        return [
            (EngineClient(engine.url, deadlines=deadlines, routing_layers=layers), engine.process) for engine in made
        ]

    async def _engines_ready(self) -> None:
        """Wait for all engines, then refuse any that this release does not know or that cannot do what the run needs.

        Raises:
            EngineError: naming the engine and what it lacks.
        """
        await self.fleet.wait_ready()
        await asyncio.gather(*(client.require_supported(routing=self._routing) for client in self._clients))
        unseeded = [client.url for client in self._clients if not (await client.identify()).seeded]
        if self._config.rollout_workers > 1 and self._config.pipeline_depth == 0:
            self._on_event("several rollout workers sample side by side: this run cannot be repeated bit for bit")
        if unseeded and self._config.pipeline_depth == 0:
            self._on_event(f"{', '.join(unseeded)} does not heed seeds: this run cannot be repeated bit for bit")

    async def load(self, start: link.Start) -> int:
        """Wait until the trainer has its model and every engine answers; returns the trainer's version.

        Raises:
            ProcessDiedError, DeadlineExceededError, TrainerFailedError: naming the process, with its log's end.
        """
        trainer = asyncio.create_task(self._trainer_ready(start))
        fleet = asyncio.create_task(self._engines_ready())
        died = asyncio.create_task(self.trainer_died())
        tasks = (trainer, fleet, died)
        try:
            waiting: set[asyncio.Task[Any]] = {trainer, fleet}
            while waiting:
                done, _ = await asyncio.wait({*waiting, died}, return_when=asyncio.FIRST_COMPLETED)
                if died in done:
                    raise died.result()
                if trainer in done and self.trainer.gone:
                    # A broken connection is noticed before the dead process is: its death is the better reason.
                    await asyncio.wait((died,), timeout=self.notice_s)
                    if died.done():
                        raise died.result()
                for task in done:
                    task.result()
                waiting -= done
            return trainer.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _trainer_ready(self, start: link.Start) -> int:
        """Have the trainer load its model; returns its version."""
        assert self._trainers is not None
        assert self._host is not None
        timeout_s = self._config.engine.start_timeout_s
        text = (
            f"process {TRAINER} is not ready yet; see {self._trainers.logs}; waiting up to {timeout_s:g} s "
            "(engine.start_timeout_s)"
        )
        async with said_when_late(self._on_event, text, PROCESS_LATE_S):
            rank_timeout_s = self._config.runtime.trainer_rank_timeout_s
            await self._trainers.form(self._host.rank_address(), rank_timeout_s, timeout_s)
            return await self.trainer.start(self._placed(start), timeout_s)

    def _placed(self, start: link.Start) -> link.Start:
        """With the address of the machine that the trainer was placed on."""
        address = self._host.trainer_address() if self._host is not None else None
        if address is None:
            return start
        return msgspec.structs.replace(start, sender=msgspec.structs.replace(start.sender, host=address))

    @property
    def notice_s(self) -> float:
        """How long it may take until the end of a process is known."""
        return self._host.notice_s if self._host is not None else 0.0

    async def trainer_died(self) -> ProcessDiedError:
        """Wait until a trainer process ends by itself."""
        assert self._trainers is not None
        return await self._trainers.died()

    async def stop(self) -> None:
        """End everything; safe to call at any moment after `launch` began."""
        timeout = self._config.runtime.stop_timeout_s
        stopping = []
        if self._trainers is not None:
            stopping.append(self._trainers.stop(timeout))
        if hasattr(self, "fleet"):
            stopping.append(self.fleet.close(timeout))  # and with it the rollout workers, its routers
        elif self.workers is not None:
            stopping.append(self.workers.close())
        await asyncio.gather(*stopping)
        if self._host is not None:
            await self._host.close()
