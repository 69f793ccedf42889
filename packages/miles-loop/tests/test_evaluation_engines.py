"""Engines that measure: whatever happens to them is the reason of a skipped point."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miles_loop.errors import ProcessDiedError
from miles_loop.evaluation_engines import EvaluationEngines
from miles_rollout.engine_client import EngineClient
from miles_rollout.evaluation import EvaluationSkippedError
from miles_rollout.router import RouterConfig


class Server(EngineClient):
    """A client whose engine answers while `well`."""

    def __init__(self, well: bool) -> None:
        super().__init__("http://127.0.0.1:9")
        self.well = well
        self.says: dict[str, Any] = {"engine": "miles"}

    async def healthy(self) -> bool:
        return self.well

    async def server_info(self) -> dict[str, Any]:
        return self.says


class Child:
    """A process that is started and dies as the test says."""

    def __init__(self, server: Server, *, lives: bool = True) -> None:
        self.name, self.log = "evaluation-engine-0", Path("none.log")
        self.url = None
        self.running = False
        self.starts = 0
        self.crashes = 0
        self._server, self._lives = server, lives
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self.starts += 1
        self.running = self._server.well = self._lives
        self._ended.clear()

    def death(self) -> ProcessDiedError:
        return ProcessDiedError(self.name, "was killed by SIGKILL", self.log, "out of memory")

    async def died(self) -> ProcessDiedError:
        await self._ended.wait()
        return self.death()

    async def displaced(self) -> bool:
        return False

    def crash(self, why: str) -> None:
        self.crashes += 1
        self.running = self._server.well = False
        self._ended.set()

    async def stop(self, timeout_s: float) -> None:
        self.running = False


def engines(server: Server, child: Child | None, start_timeout_s: float = 60) -> EvaluationEngines:
    return EvaluationEngines([(server, child)], router=RouterConfig(), start_timeout_s=start_timeout_s)


async def value() -> int:
    return 7


async def test_they_are_started_when_needed_and_again_after_a_death() -> None:
    server = Server(well=False)
    child = Child(server)
    made = engines(server, child)
    await made.ready()
    await made.ready()
    assert child.starts == 1
    assert await made.measure(value()) == 7
    child.crash("on purpose")
    await made.ready()
    assert child.starts == 2
    await made.close(1)
    assert not child.running


async def test_a_death_ends_the_measurement_at_once() -> None:
    server = Server(well=False)
    child = Child(server)
    made = engines(server, child)
    await made.ready()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    measuring = asyncio.create_task(made.measure(work()))
    await asyncio.sleep(0)
    child.crash("on purpose")
    with pytest.raises(EvaluationSkippedError, match="SIGKILL") as caught:
        await measuring
    assert caught.value.kind == "unhealthy"
    assert ended.is_set(), "nothing goes on in the background"
    await made.close(1)


async def test_one_that_does_not_start_is_named() -> None:
    server = Server(well=False)
    made = engines(server, Child(server, lives=False))
    with pytest.raises(EvaluationSkippedError, match="out of memory"):
        await made.ready()
    await made.close(1)


async def test_one_that_never_answers_is_killed_so_that_the_next_is_fresh() -> None:
    server = Server(well=False)
    child = Child(server)
    child.running = True  # and does not answer
    made = engines(server, child, start_timeout_s=0.01)
    with pytest.raises(EvaluationSkippedError, match="did not answer within"):
        await made.ready()
    assert child.crashes == 1
    await made.close(1)


async def test_an_attached_engine_is_waited_for_and_never_started() -> None:
    server = Server(well=True)
    made = engines(server, None)
    await made.ready()
    assert await made.measure(value()) == 7
    server.well = False
    short = engines(server, None, start_timeout_s=0.01)
    with pytest.raises(EvaluationSkippedError, match="did not answer within"):
        await short.ready()
    await made.close(1)
    await short.close(1)


async def test_one_that_is_not_known_measures_nothing() -> None:
    server = Server(well=True)
    server.says = {"version": "0.4.1"}
    made = engines(server, None)
    with pytest.raises(EvaluationSkippedError, match=r"SGLang in version 0\.4\.1 is not known") as skipped:
        await made.ready()
    assert skipped.value.kind == "unhealthy"
    await made.close(1)
