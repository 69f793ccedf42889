"""What the fleet tells the routers: which engines may serve, at which version, and that weights are changing.

The fleet knows one `Routing`. In the driver's own process it is `LocalRouting`; where answers are made by rollout
workers it is theirs (`miles_loop.rollout_workers`), which repeats every word, in order, to a `LocalRouting` in each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from miles_contracts import Engine
from miles_loop.audit import EngineRecords, RecordingEngine
from miles_loop.bundles import BundlingEngine
from miles_loop.gateway import Gateway
from miles_loop.lockstep import Lockstep, LockstepEngine
from miles_rollout.engine_client import EngineClient
from miles_rollout.router import Router, RouterConfig


class Routing(Protocol):
    """The routers of a run, wherever they are."""

    @property
    def in_step(self) -> bool:
        """Whether requests go out in rounds, so that the run can be repeated bit for bit."""

    async def start(self) -> None:
        """Every engine answers: begin to route.

        Raises:
            MilesError: they cannot.
        """

    def set_version(self, version: int) -> None:
        """Engines must serve `version` from now on."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """While weights change: entered only when every router knows that versions are not to be judged."""

    def quarantine(self, url: str, reason: str) -> None:
        """Take an engine out of service."""

    async def readmit(self, url: str, address: str) -> None:
        """An engine has the current weights and may serve; it answers at `address`."""

    def take_metrics(self) -> dict[str, float]:
        """What was routed since the last call."""

    async def close(self) -> None:
        """End what `start` began."""


class LocalRouting:
    """Routers in this process, one of training and one of evaluation.

    Args:
        clients: the engines, in order.
        records: what engines answer to training is recorded here.
        config: deadlines and limits of both routers.
        gateway: SGLang's router, through which turns go; None for Miles' own.
        lockstep: send requests in rounds (see `miles_loop.lockstep`).
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        records: EngineRecords,
        config: RouterConfig,
        *,
        gateway: Gateway | None = None,
        lockstep: bool = False,
    ) -> None:
        self.lockstep = Lockstep() if lockstep else None
        """Rounds of training; whoever knows how many trajectories are in flight tells it."""
        self.evaluation_lockstep = Lockstep() if lockstep else None
        self._training: dict[str, Engine] = {
            client.url: RecordingEngine(_together(client, self.lockstep), records) for client in clients
        }
        self._evaluation = {client.url: _together(client, self.evaluation_lockstep) for client in clients}
        training, evaluation = list(self._training.values()), list(self._evaluation.values())
        self.router: Router
        """Routes training: every answer is recorded."""
        self.evaluation_router: Router
        """Routes evaluation: nothing is recorded."""
        if gateway is None:
            self.router, self.evaluation_router = Router(training, config=config), Router(evaluation, config=config)
        else:
            self.router, self.evaluation_router = gateway.routers(training, evaluation, records, config)

    @property
    def _routers(self) -> tuple[Router, Router]:
        return (self.router, self.evaluation_router)

    @property
    def in_step(self) -> bool:
        """Whether requests go out in rounds."""
        return self.lockstep is not None

    async def start(self) -> None:
        """Begin the health checks."""
        for router in self._routers:
            await router.start()

    def set_version(self, version: int) -> None:
        """Engines must serve `version` from now on."""
        for router in self._routers:
            router.set_version(version)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """While weights change."""
        with self.changing():
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The same for a caller that has nothing to wait for."""
        with self.router.updating(), self.evaluation_router.updating():
            yield

    def quarantine(self, url: str, reason: str) -> None:
        """Take an engine out of service."""
        for router in self._routers:
            router.quarantine(url, reason)

    async def readmit(self, url: str, address: str) -> None:
        """Let the routers use an engine that has the current weights; its client has moved to `address` already."""
        self.router.add_engine(self._training[url])
        self.evaluation_router.add_engine(self._evaluation[url])
        for router in self._routers:
            await router.check_health()

    def take_metrics(self) -> dict[str, float]:
        """What was routed of training since the last call."""
        return self.router.take_metrics()

    async def close(self) -> None:
        """End the health checks."""
        await asyncio.gather(*(router.close() for router in self._routers))


def _together(client: EngineClient, lockstep: Lockstep | None) -> Engine:
    """The engine with few calls: in rounds, or what is asked for in one moment."""
    return BundlingEngine(client) if lockstep is None else LockstepEngine(client, lockstep)
