"""Engines come, go and come back; what serves has the fleet's weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_contracts import (
    EngineUnavailableError,
    GenerateResult,
    PauseMode,
    SamplingParams,
    ShmBucket,
    VersionSpan,
    WeightManifest,
    WeightUpdateError,
)
from miles_loop.audit import EngineRecords
from miles_loop.errors import ProcessDiedError, RunError
from miles_loop.fleet import Fleet
from miles_rollout.engine_identity import EngineIdentity, EngineKind
from miles_sync import Expect


class Engine:
    """An engine in memory. `refuses` makes commits fail that many times; a dead one answers nothing; one that is
    stuck says the same whatever its version."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version: int | None = None
        self.dead = False
        self.refuses = 0
        self.flushed = 0
        self.stuck = False
        self.probes = 0
        self.address = url
        self._next: int | None = None

    async def streams_batches(self) -> bool:
        return False

    def _check(self) -> None:
        if self.dead:
            raise EngineUnavailableError(self.url, "dead")

    async def healthy(self) -> bool:
        return not self.dead

    async def identify(self) -> EngineIdentity:
        self._check()
        return EngineIdentity(kind=EngineKind.EMBEDDED)

    async def weight_version(self) -> int | None:
        self._check()
        return self.version

    async def pause(self, mode: PauseMode) -> None:
        self._check()

    async def resume(self) -> None:
        self._check()

    async def flush_cache(self) -> None:
        self.flushed += 1

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        self._check()
        self._next = manifest.version

    async def commit_weight_update(self, update_id: str) -> None:
        self._check()
        if self.refuses:
            self.refuses -= 1
            raise WeightUpdateError("digest differs", engine=self.url, tensor="w")
        self.version = self._next

    async def rollback_weight_update(self, update_id: str) -> None:
        self._check()
        if self._next == self.version:
            raise WeightUpdateError("it is committed", engine=self.url)

    async def move_to(self, url: str) -> None:
        self.address = url

    async def close(self) -> None:
        """Nothing is open."""

    async def generate(self, input_ids: Any, params: SamplingParams, **_: Any) -> GenerateResult:
        self._check()
        self.probes += 1
        spans = (VersionSpan(start=0, end=1, version=self.version),)
        moved = 0.0 if self.stuck else -0.1 * (self.version or 0)
        return GenerateResult(
            output_ids=np.array([7], np.int32),
            logprobs=np.full(1, moved, np.float32),
            version_spans=spans,
            finish_reason="stop",
            request_id=f"{self.url}-{len(input_ids)}",
        )


class Process:
    """A process in memory, tied to its engine."""

    log = Path("engine.log")

    def __init__(self, engine: Engine) -> None:
        self.name = engine.url
        self.starts = 0
        self.url: str | None = None
        self.robbed = False
        self._engine = engine
        self._ended = asyncio.Event()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def death(self) -> ProcessDiedError:
        return ProcessDiedError(self.name, "was killed", self.log, "")

    async def died(self) -> ProcessDiedError:
        await self._ended.wait()
        return self.death()

    async def displaced(self) -> bool:
        return self.robbed

    def crash(self, why: str) -> None:
        self._engine.dead = True
        self._ended.set()

    async def start(self) -> None:
        self.starts += 1
        if self.robbed:
            self.url, self.robbed = f"{self.name}:moved", False
        self._ended.clear()
        self._engine.dead, self._engine.version = False, None

    async def stop(self, timeout_s: float) -> None:
        """Ended."""


class Source:
    """A trainer without tensors."""

    def __init__(self) -> None:
        self.updates = 0

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self.updates += 1
        return f"u{self.updates}", WeightManifest(version=version, tensors=())

    async def buckets(self, update_id: str) -> AsyncIterator[ShmBucket]:
        return
        yield

    async def acknowledge(self, update_id: str, index: int) -> None:
        """Nothing is held."""

    async def release(self, update_id: str) -> None:
        """Nothing is held."""


class Scene:
    """A fleet over engines in memory."""

    def __init__(self, count: int, *, restarts: int = 1, processes: bool = True, canary: Expect | None = None) -> None:
        self.engines = [Engine(f"http://e{i}") for i in range(count)]
        self.processes = [Process(engine) for engine in self.engines]
        self.events: list[str] = []
        self.records = EngineRecords()
        ours: list[Any] = list(self.processes) if processes else [None] * count
        pairs: Any = list(zip(self.engines, ours, strict=True))
        self.source = Source()
        self.fleet = Fleet(
            pairs,
            source=self.source,
            canary=canary,
            records=self.records,
            mode=PauseMode.RETRACT,
            update_deadline_s=5,
            start_timeout_s=5,
            restarts=restarts,
            on_event=self.events.append,
        )

    async def start(self, version: int = 0) -> None:
        """Ready, with weights."""
        await self.fleet.wait_ready()
        await self.update(version)

    async def update(self, version: int) -> Any:
        """As the driver does it."""
        async with self.fleet.weights_lock:
            return await self.fleet.update(version)


@pytest.fixture
async def scenes() -> AsyncIterator[list[Scene]]:
    """Scenes that are closed after the test."""
    made: list[Scene] = []
    yield made
    for scene in made:
        await scene.fleet.close(0.1)


async def until(condition: Any) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_every_engine_gets_every_version_and_answers_are_recorded(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    report = await scene.update(1)
    assert sorted(report.serving) == ["http://e0", "http://e1"]
    assert [e.version for e in scene.engines] == [1, 1]
    await scene.fleet.router.generate("a", [1], SamplingParams(max_new_tokens=1))
    await scene.fleet.evaluation_router.generate("b", [1, 2], SamplingParams(max_new_tokens=1))
    assert (len(scene.records), scene.records.tokens_sampled) == (1, 1)


async def test_a_dead_engine_comes_back_with_the_weights_of_now(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    scene.processes[0].crash("on purpose")
    await until(lambda: scene.engines[0].version == 0)
    await until(lambda: "http://e0 serves again" in " ".join(scene.events))
    assert (scene.fleet.restarts, scene.processes[0].starts) == (1, 1)
    assert not scene.fleet.router.quarantined


async def test_a_port_that_somebody_took_before_the_engine_was_up_costs_no_restart(
    scenes: list[Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(2, restarts=0)
    scenes.append(scene)
    scene.processes[0].crash("its port is taken")
    scene.processes[0].robbed = True
    told: list[tuple[str, str]] = []
    readmit = scene.fleet.routing.readmit

    async def overheard(url: str, address: str) -> None:
        told.append((url, address))
        await readmit(url, address)

    monkeypatch.setattr(scene.fleet.routing, "readmit", overheard)
    await scene.start()
    assert told == [("http://e0", "http://e0:moved")], "routers elsewhere call it there"
    assert [e.address for e in scene.engines] == ["http://e0:moved", "http://e1"]
    assert [e.version for e in scene.engines] == [0, 0]
    assert (scene.processes[0].starts, scene.fleet.restarts) == (1, 0)
    assert "another program listens on its port" in scene.events[0]


async def test_an_engine_that_comes_back_elsewhere_is_called_there(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    scene.processes[0].url = "http://elsewhere"
    scene.processes[0].crash("on purpose")
    await until(lambda: "http://e0 serves again" in " ".join(scene.events))
    assert [e.address for e in scene.engines] == ["http://elsewhere", "http://e1"]
    assert scene.engines[0].version == 0
    assert not scene.fleet.router.quarantined


async def test_an_engine_that_dies_while_weights_change_gets_the_new_ones(scenes: list[Scene]) -> None:
    scene = Scene(1)
    scenes.append(scene)
    await scene.start()
    async with scene.fleet.weights_lock:
        scene.processes[0].crash("on purpose")
        await until(lambda: scene.processes[0].starts == 1)
        assert await scene.fleet.update(1) is None  # nobody is up: it comes later
        assert scene.engines[0].version is None
    await until(lambda: scene.engines[0].version == 1)
    await until(lambda: not scene.fleet.router.quarantined)


async def test_an_engine_that_dies_in_an_update_is_left_out_and_brought_back(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    scene.engines[1].dead = True  # it answers nothing, its process has not ended yet
    await scene.update(1)
    assert scene.engines[0].version == 1
    await until(lambda: scene.engines[1].version == 1)
    assert scene.fleet.restarts == 1


async def test_a_refused_update_is_tried_again(scenes: list[Scene]) -> None:
    scene = Scene(1)
    scenes.append(scene)
    await scene.start()
    scene.engines[0].refuses = 1
    assert await scene.update(1) is not None
    assert scene.engines[0].version == 1
    assert "trying again" in scene.events[0]


async def test_a_fenced_engine_that_answers_is_updated_again_and_not_restarted(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    scene.engines[1].refuses = 1  # the other one commits: there is no way back
    before = scene.source.updates
    await scene.update(1)
    assert [e.version for e in scene.engines] == [1, 1]
    assert scene.source.updates == before + 2
    assert scene.fleet.restarts == 0
    assert not scene.fleet.router.quarantined
    assert "is updated again" in scene.events[0]


async def test_an_engine_that_stays_fenced_is_restarted(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    scene.engines[1].refuses = 3  # once beside the other one, twice alone
    await scene.update(1)
    assert [e.version for e in scene.engines] == [1, 0]
    await until(lambda: scene.engines[1].version == 1)
    assert scene.fleet.restarts == 1


async def test_an_update_that_is_refused_again_and_again_ends_the_run(scenes: list[Scene]) -> None:
    scene = Scene(1)
    scenes.append(scene)
    await scene.start()
    scene.engines[0].refuses = 99
    with pytest.raises(RunError, match="digest differs") as caught:
        await scene.update(1)
    assert caught.value.reason == "weight_update_failed"
    assert scene.engines[0].version == 0


async def test_when_restarts_are_used_up_the_others_go_on(scenes: list[Scene]) -> None:
    scene = Scene(2, restarts=0)
    scenes.append(scene)
    await scene.start()
    scene.processes[0].crash("on purpose")
    await until(lambda: scene.events)
    assert "is given up" in scene.events[0]
    assert not scene.fleet.failed.done()
    await scene.update(1)
    assert scene.engines[1].version == 1
    scene.processes[1].crash("on purpose")
    await until(scene.fleet.failed.done)
    assert scene.fleet.failed.result().reason == "process_died"


async def test_engines_of_others_cannot_be_brought_back(scenes: list[Scene]) -> None:
    scene = Scene(1, processes=False)
    scenes.append(scene)
    await scene.start()
    scene.engines[0].dead = True
    with pytest.raises(RunError) as caught:
        await scene.update(1)
    assert caught.value.reason == "engines_gone"


@pytest.mark.parametrize(("processes", "said"), [(False, "is it running?"), (True, "see engine.log")])
async def test_an_engine_that_does_not_answer_yet_is_named(
    scenes: list[Scene], monkeypatch: pytest.MonkeyPatch, processes: bool, said: str
) -> None:
    monkeypatch.setattr("miles_loop.fleet.ATTACHED_LATE_S", 0.01)
    monkeypatch.setattr("miles_loop.fleet.PROCESS_LATE_S", 0.01)
    scene = Scene(1, processes=processes)
    scenes.append(scene)
    scene.engines[0].dead = True
    waiting = asyncio.create_task(scene.fleet.wait_ready())
    await until(lambda: scene.events)
    assert "http://e0" in scene.events[0]
    assert said in scene.events[0]
    assert "(engine.start_timeout_s)" in scene.events[0]
    scene.engines[0].dead = False
    await waiting
    assert len(scene.events) == 1


async def test_an_engine_that_ends_before_it_answers_is_named(scenes: list[Scene]) -> None:
    scene = Scene(1)
    scenes.append(scene)
    scene.processes[0].crash("on purpose")
    with pytest.raises(ProcessDiedError, match="http://e0 was killed"):
        await scene.fleet.wait_ready()


async def test_the_canary_is_off_unless_asked_for(scenes: list[Scene]) -> None:
    scene = Scene(1)
    scenes.append(scene)
    await scene.start()
    await scene.update(1)
    assert scene.engines[0].probes == 0


async def test_an_engine_that_answers_as_before_is_restarted(scenes: list[Scene]) -> None:
    scene = Scene(1, canary=Expect.CHANGE)
    scenes.append(scene)
    await scene.start()  # what an engine loaded itself need not move
    await scene.update(1)
    assert scene.engines[0].probes > 0
    scene.engines[0].stuck = True
    await scene.update(2)  # it said something else before
    await scene.update(3)
    assert "serves its old weights" in scene.events[0]
    await until(lambda: scene.processes[0].starts == 1 and scene.engines[0].version == 3)


async def test_a_flush_reaches_the_engines_that_are_up(scenes: list[Scene]) -> None:
    scene = Scene(2)
    scenes.append(scene)
    await scene.start()
    await scene.fleet.flush()
    assert [e.flushed for e in scene.engines] == [1, 1]
