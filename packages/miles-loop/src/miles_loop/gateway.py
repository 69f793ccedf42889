"""SGLang's router as a process of a run: started beside the engines, started again when it dies, ended with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from miles_contracts import DeadlineExceededError, Engine, InvalidFieldError
from miles_loop.audit import EngineRecords, RecordingEngine
from miles_loop.config import RouterKind, RunConfig, RuntimeKind
from miles_loop.errors import RunError
from miles_loop.late import PROCESS_LATE_S, said_when_late
from miles_loop.processes import Process, ProcessSpec
from miles_loop.serving import start_elsewhere
from miles_rollout.engine_client import Deadlines
from miles_rollout.router import RouterConfig
from miles_rollout.router.gateway import (
    MODULE,
    GatewayClient,
    GatewayRouter,
    Workers,
    gateway_arguments,
    require_gateway,
)

_POLL_S = 0.1
_EVALUATION = "evaluation "
"""Put before the keys of evaluation's sessions."""


def gateway_spec(host: str, port: int, metrics_port: int) -> ProcessSpec:
    """Process of sglang-router."""
    return ProcessSpec(name="router", module=MODULE, arguments=tuple(gateway_arguments(host, port, metrics_port)))


def require_router(config: RunConfig, *, routing: bool) -> None:
    """Refuse a router that is not there or cannot do what the run needs.

    Args:
        config: of the run.
        routing: the run needs expert choices.

    Raises:
        InvalidFieldError: what is wrong, and the remedy.
    """
    if config.engine.router is RouterKind.OWN:
        return
    require_gateway()
    if config.runtime.kind is RuntimeKind.RAY:
        raise InvalidFieldError("engine.router", "sglang", "engines on Ray change their addresses; use own")
    if config.rollout_workers:
        remedy = "sglang's router is told what to do by the driver alone; use engine.router own, or 0"
        raise InvalidFieldError("runtime.rollout_workers", config.rollout_workers, remedy)
    if routing:
        remedy = "sglang-router drops expert choices; use own, or switch trainer.replay.enabled off"
        raise InvalidFieldError("engine.router", "sglang", remedy)


class Gateway:
    """The running process.

    Args:
        process: of sglang-router, with the address that it has first.
        deadlines: longest waits of turns.
        start_timeout_s: of its start.
        restarts: how often it is started again.
        on_event: told, in words, what happened to it.
    """

    def __init__(
        self,
        process: Process,
        *,
        deadlines: Deadlines,
        start_timeout_s: float,
        restarts: int,
        on_event: Callable[[str], None],
    ) -> None:
        self.process = process
        assert process.url is not None
        self._client = GatewayClient(process.url, deadlines=deadlines)
        self._workers = Workers(process.url)
        self._start_timeout_s = start_timeout_s
        self._restarts_left = restarts
        self._on_event = on_event

    def routers(
        self, training: Sequence[Engine], evaluation: Sequence[Engine], records: EngineRecords, config: RouterConfig
    ) -> tuple[GatewayRouter, GatewayRouter]:
        """The routers of training, whose answers are recorded, and of evaluation."""
        recording = RecordingEngine(self._client, records)
        return (
            GatewayRouter(training, recording, workers=self._workers, config=config),
            GatewayRouter(
                evaluation,
                self._client,
                workers=self._workers,
                keeps_workers=False,
                prefix=_EVALUATION,
                config=config,
            ),
        )

    async def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            ProcessDiedError: it ended before.
            DeadlineExceededError: it did not answer in time.
        """
        text = (
            f"process {self.process.name} is not ready yet; see {self.process.log}; waiting up to "
            f"{self._start_timeout_s:g} s (engine.start_timeout_s)"
        )
        try:
            async with (
                said_when_late(self._on_event, text, PROCESS_LATE_S),
                asyncio.timeout(self._start_timeout_s),
            ):
                await self._follow()
                while not await self._workers.ready():
                    if not self.process.running:
                        await start_elsewhere(self.process, self._on_event)
                    await self._follow()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            remedy = f"see {self.process.log}, or raise engine.start_timeout_s"
            raise DeadlineExceededError("sglang-router", self._start_timeout_s, remedy) from None

    async def _follow(self) -> None:
        """Ask where the process is now."""
        url = self.process.url
        if url is not None and url != self._client.address:
            await self._client.move_to(url)
            await self._workers.move_to(url)

    async def watch(self) -> RunError:
        """Start it again whenever it dies; returns the reason when that is no longer allowed."""
        while True:
            death = await self.process.died()
            if self._restarts_left == 0:
                return death
            self._restarts_left -= 1
            self._on_event(f"sglang-router: {self.process.name} {death.how}; starting it again")
            try:
                await self.process.start()
                await self.wait_ready()
            except (RunError, DeadlineExceededError) as error:
                self._on_event(f"sglang-router could not be brought back: {error}")
                self.process.crash("it could not be brought back")

    async def close(self, stop_timeout_s: float) -> None:
        """End connections and process."""
        await self._client.close()
        await self._workers.close()
        await self.process.stop(stop_timeout_s)
