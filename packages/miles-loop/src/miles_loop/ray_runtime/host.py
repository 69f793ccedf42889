"""The host of a run's processes on a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_contracts import InvalidFieldError
from miles_loop.config import PeerBackendKind, RouterKind, RunConfig, TransportKind
from miles_loop.hosts import EngineSpec, HostedEngine, Linked, LinkedSpec
from miles_loop.processes import ProcessSpec
from miles_loop.ray_runtime.actor_process import ActorProcess, Settle, Settled
from miles_loop.ray_runtime.cluster import Cluster
from miles_loop.ray_runtime.placement import Bundle, plan
from miles_loop.ray_runtime.supervisor import Place, Supervisor
from miles_loop.ray_runtime.visibility import require_shared_memory, require_visible
from miles_loop.rollout_workers import worker_name
from miles_loop.run_folder import RunFolder
from miles_loop.tcp_link import SECRET_VARIABLE, Listener, join_address
from miles_loop.trainer_group import rank_name

_LOCAL_ADDRESSES = ("127.0.0.1", "localhost")


class RayHost:
    """Places trainer, engines and rollout workers by one placement group, each below a supervising actor.

    Every node has to see the run folder (logs and checkpoints are written there by the processes themselves) and the
    model; engines also have to see the trainer's shared memory. Each node is asked before anything starts on it.

    Args:
        config: of the run.
        folder: its folder.
        model: folder that is loaded.
        on_event: told, in words, what is waited for.
    """

    notice_s = 60.0  # Ray calls a node dead after several missed health checks, by default some 20 s

    def __init__(self, config: RunConfig, folder: RunFolder, model: Path, on_event: Callable[[str], None]) -> None:
        _check(config)
        self._config = config
        self._logs = folder.logs.resolve()
        self._folders = {"model": model, "run_dir": self._logs}
        self._cluster = Cluster(config.runtime.ray, on_event)
        self._bundles: list[Bundle] = []
        self._has_trainer = False
        self._workers = 0
        self._address = ""
        self._trainers: list[ActorProcess] = []
        self._trainer_actor: tuple[Any, Place] | None = None
        self._trainer_placed = asyncio.Event()

    async def open(self, *, engines: int, trainer: bool, workers: int = 0) -> None:
        """Join the cluster and reserve room.

        Raises:
            InvalidFieldError: no cluster at the address.
            RunError: `no_room`.
        """
        self._has_trainer = trainer
        self._workers = workers
        self._bundles = plan(self._config, engines=engines, trainer=trainer, workers=workers)
        self._address = await self._cluster.join(sum(bundle.cpus for bundle in self._bundles))
        if self._bundles:
            await self._cluster.reserve(self._bundles)

    def make_trainer(self, rank: int, spec: LinkedSpec) -> Linked:
        """The process of a rank; it connects to the driver, and nobody else can."""

        def placed(actor: Any, place: Place) -> None:
            if rank == 0:
                self._trainer_actor = (actor, place)
                self._trainer_placed.set()

        process, listener = self._linked(rank_name(rank), rank, rank, spec, placed)
        self._trainers.append(process)
        return Linked(process, listener)

    async def make_engines(self, spec: EngineSpec) -> Sequence[HostedEngine]:
        """The engine processes, their actors placed.

        Raises:
            RunError: `no_room`.
            InvalidFieldError: a node does not see what it has to.
        """
        first = self._config.runtime.trainer_ranks if self._has_trainer else 0

        def make(index: int) -> ActorProcess:
            async def settle(actor: Any, place: Place) -> Settled:
                await require_visible(actor, place, self._folders)
                if self._has_trainer and _shares_memory(self._config):
                    await self._trainer_placed.wait()
                    assert self._trainer_actor is not None
                    await require_shared_memory(self._trainer_actor, (actor, place), self._config.sync.directory)
                port = await actor.keep_port.remote(place.host)
                made = self._with_environment(spec(index, place.host, port), {})
                return Settled(made, f"http://{join_address(place.host, port)}")

            return self._process(f"engine-{index}", first + index, settle)

        engines = [make(index) for index in range(len(self._bundles) - first - self._workers)]
        trainers = self._trainers if self._has_trainer else []
        await _together([process.reserve() for process in (*trainers, *engines)])
        return [HostedEngine(str(engine.url), engine) for engine in engines]

    def make_worker(self, index: int, spec: LinkedSpec) -> Linked:
        """A rollout worker; it connects to the driver, and nobody else can."""
        bundle = len(self._bundles) - self._workers + index
        return Linked(*self._linked(worker_name(index), bundle, index, spec))

    def trainer_address(self) -> str | None:
        """That of the trainer's node, unless the settings name another one (of a faster network, say)."""
        if self._trainer_actor is None or self._config.sync.host not in _LOCAL_ADDRESSES:
            return None
        return self._trainer_actor[1].host

    def rank_address(self) -> str:
        """That of the node of rank 0."""
        assert self._trainer_actor is not None
        return self._trainer_actor[1].host

    async def close(self) -> None:
        """Give the room back and leave the cluster."""
        await self._cluster.close()

    def _linked(
        self,
        name: str,
        bundle: int,
        number: int,
        spec: LinkedSpec,
        placed: Callable[[Any, Place], None] | None = None,
    ) -> tuple[ActorProcess, Listener]:
        """A process that connects to the driver with a secret of its own; `placed` is told once it has a node."""
        listener = Listener(self._address)

        async def settle(actor: Any, place: Place) -> Settled:
            await require_visible(actor, place, self._folders)
            if placed is not None:
                placed(actor, place)
            return Settled(self._with_environment(spec(number, listener.address), {SECRET_VARIABLE: listener.secret}))

        return self._process(name, bundle, settle), listener

    def _process(self, name: str, index: int, settle: Settle) -> ActorProcess:
        def make() -> Any:
            bundle = self._bundles[index]
            return (
                ray.remote(Supervisor)
                .options(
                    num_cpus=bundle.cpus,
                    num_gpus=bundle.gpus,
                    resources=dict(bundle.others),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._cluster.group, placement_group_bundle_index=index
                    ),
                )
                .remote()
            )

        return ActorProcess(
            name,
            self._logs / f"{name}.log",
            make=make,
            settle=settle,
            nodes=self._cluster.nodes,
            deadline_s=self._config.runtime.ray.placement_timeout_s,
        )

    def _with_environment(self, spec: ProcessSpec, more: dict[str, str]) -> ProcessSpec:
        environment = {**self._config.runtime.ray.env, **spec.environment, **more}
        return dataclasses.replace(spec, environment=environment)


def _shares_memory(config: RunConfig) -> bool:
    """Whether weights need a machine that trainer and engines share."""
    sync = config.sync
    peers = sync.transport is TransportKind.PEER and sync.peer_backend is PeerBackendKind.SHARED
    return sync.transport is TransportKind.LOCAL or peers


def _check(config: RunConfig) -> None:
    """Refuse what has no meaning on a cluster.

    Raises:
        InvalidFieldError: naming it.
    """
    if config.engine.host not in _LOCAL_ADDRESSES:
        raise InvalidFieldError(
            "engine.host", config.engine.host, "on a Ray cluster engines listen on their own node's address; leave out"
        )
    if config.engine.port:
        raise InvalidFieldError(
            "engine.port", config.engine.port, "on a Ray cluster a free port of the engine's node is taken; leave out"
        )
    if config.engine.router is RouterKind.SGLANG:
        raise InvalidFieldError(
            "engine.router",
            config.engine.router.value,
            "it knows engines by the addresses of their first start, and on a Ray cluster they may move; use own",
        )


async def _together(work: Sequence[Awaitable[None]]) -> None:
    """All of it; when one fails, the others are not waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
