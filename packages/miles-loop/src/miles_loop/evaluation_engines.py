"""Engines that only measure snapshots: started when they are first needed, and again for the next one when they died.

They are no part of the fleet: no weight update waits for them, and whatever happens to them costs a point of the
evaluation curve and never the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from miles_contracts import EngineError
from miles_loop.errors import RunError
from miles_loop.processes import Process
from miles_loop.serving import until_healthy
from miles_rollout.engine_client import EngineClient
from miles_rollout.evaluation import EvaluationSkippedError
from miles_rollout.router import Router, RouterConfig

_log = logging.getLogger(__name__)
T = TypeVar("T")


class EvaluationEngines:
    """Engines with their router.

    Args:
        engines: clients, each with its process or None for an engine that somebody else runs.
        router: deadlines and limits.
        start_timeout_s: of one start.
    """

    def __init__(
        self,
        engines: Sequence[tuple[EngineClient, Process | None]],
        *,
        router: RouterConfig,
        start_timeout_s: float,
    ) -> None:
        self._engines = tuple(engines)
        self._start_timeout_s = start_timeout_s
        # Nobody brings an engine back while it measures: a turn without an engine has nothing to wait for.
        waits = min(router.no_engine_s, router.health_deadline_s)
        self.router = Router(self.clients, config=router.model_copy(update={"no_engine_s": waits}))

    @property
    def clients(self) -> list[EngineClient]:
        """The engines."""
        return [client for client, _ in self._engines]

    async def measure(self, work: Awaitable[T]) -> T:
        """The result of `work`, which uses the engines.

        Raises:
            EvaluationSkippedError: `unhealthy`: an engine died meanwhile.
        """
        working = asyncio.ensure_future(work)
        deaths = [asyncio.create_task(process.died()) for _, process in self._engines if process is not None]
        try:
            await asyncio.wait((working, *deaths), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            died = next(task.result() for task in deaths if task.done())
            raise EvaluationSkippedError("unhealthy", str(died))
        finally:
            for task in (working, *deaths):
                task.cancel()
            await asyncio.gather(working, *deaths, return_exceptions=True)

    async def ready(self) -> None:
        """Start what does not run and wait until every engine answers.

        Raises:
            EvaluationSkippedError: `unhealthy`: one did not start, or is none that is known.
        """
        try:
            await asyncio.gather(*(self._ready(client, process) for client, process in self._engines))
        except (RunError, EngineError) as error:
            raise EvaluationSkippedError("unhealthy", str(error)) from error

    async def _ready(self, client: EngineClient, process: Process | None) -> None:
        if process is not None and not process.running:
            await process.start()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await until_healthy(client, process, _log.warning)
                await client.require_supported()
        except TimeoutError:
            if process is not None:
                process.crash("it hung")  # the next evaluation starts it afresh
            reason = f"the engine at {client.url} did not answer within {self._start_timeout_s:g} s"
            raise EvaluationSkippedError("unhealthy", reason) from None

    async def close(self, stop_timeout_s: float) -> None:
        """End connections and processes."""
        await self.router.close()
        await asyncio.gather(*(client.close() for client in self.clients))
        await asyncio.gather(*(p.stop(stop_timeout_s) for _, p in self._engines if p is not None))
