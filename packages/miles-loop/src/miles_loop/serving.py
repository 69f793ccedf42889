"""Processes that serve at an address: started again where they were, or elsewhere when somebody has taken that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_loop.ports import Port
from miles_loop.processes import ChildProcess, Process, ProcessSpec
from miles_loop.zygote import Zygote
from miles_rollout.engine_client import EngineClient

_POLL_S = 0.05


class ServingChild(ChildProcess):
    """A child that listens on ports of its own.

    Args:
        make: from the numbers of its ports to what is run.
        log: file that its output is appended to.
        ports: kept until it is stopped. `url` is that of the first.
        moves: False for a process that has to stay where it is, or to fail.
        zygote: forks it where that is possible.
    """

    def __init__(
        self,
        make: Callable[[Sequence[int]], ProcessSpec],
        log: Path,
        ports: Sequence[Port],
        *,
        moves: bool = True,
        zygote: Zygote | None = None,
    ) -> None:
        self._make = make
        self._ports = list(ports)
        self._moves = moves
        super().__init__(make([port.number for port in ports]), log, zygote=zygote)

    @property
    def url(self) -> str:
        """Where it answers since its last start."""
        return self._ports[0].url

    async def displaced(self) -> bool:
        """Whether somebody else listens where it should, so that it moves with its next start."""
        return self._moves and not self.running and any(port.taken() for port in self._ports)

    async def start(self) -> None:
        """Start it, elsewhere when it is displaced."""
        if await self.displaced():
            self._ports = [port.another() if port.taken() else port for port in self._ports]
            self.spec = self._make([port.number for port in self._ports])
        await super().start()

    async def stop(self, timeout_s: float) -> None:
        """End it, and let go of its ports."""
        await super().stop(timeout_s)
        for port in self._ports:
            port.close()


async def start_elsewhere(process: Process, on_event: Callable[[str], None]) -> None:
    """Start a process again that ended because somebody else has its address; that costs none of its restarts.

    Raises:
        ProcessDiedError: it ended for another reason.
    """
    death = process.death()
    if not await process.displaced():
        raise death
    await process.start()
    on_event(f"{death.name} {death.how}: another program listens on its port; it is started again elsewhere")


async def until_healthy(client: EngineClient, process: Process | None, on_event: Callable[[str], None]) -> None:
    """Wait until an engine answers, where its process serves now.

    Args:
        client: of the engine; told when the process moves.
        process: the engine's, None for an engine that somebody else runs.
        on_event: told, in words, that the engine has moved, and why.

    Raises:
        ProcessDiedError: the process ended, and not because somebody else has its port.
    """
    while True:
        if process is not None and not process.running:
            await start_elsewhere(process, on_event)
        if process is not None and process.url is not None and process.url != client.address:
            on_event(f"{process.name} is called at {process.url} from now on, not at {client.address}")
            await client.move_to(process.url)
        if await client.healthy():
            return
        await asyncio.sleep(_POLL_S)
