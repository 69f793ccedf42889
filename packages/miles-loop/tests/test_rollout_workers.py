"""Rollout workers as a run sees them: work goes where least is under way, and a loss costs time and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from loop_toy.groups import answer, trajectory
from loop_toy.recipe import RECIPE

from miles_contracts import Message, Task, Trajectory
from miles_loop import rollout_link as link
from miles_loop.arguments import config_for, parse
from miles_loop.audit import EngineRecords
from miles_loop.errors import ProcessDiedError, RunError
from miles_loop.fleet_view import EngineState, FleetState
from miles_loop.frames import FrameLink
from miles_loop.hosts import Linked
from miles_loop.rollout_client import WorkerLostError
from miles_loop.rollout_workers import RolloutWorkers, start_message
from miles_rollout.episodes import EpisodeFailedError
from miles_rollout.router.counts import RouterCounts

TASK = Task(prompt_index=7, messages=(Message(role="user", content="hi"),))


class Worker:
    """A process in memory, with the worker in it. `holds` keeps answers back, `mute` says nothing at all."""

    def __init__(self, scene: Scene, index: int, theirs: socket.socket) -> None:
        self.name, self.log = f"rollout-{index}", Path("/logs") / f"rollout-{index}.log"
        self.url = None
        self.heard: list[Any] = []
        self.held: list[link.Issue] = []
        self.crashes: list[str] = []
        self._scene = scene
        self._socket = theirs
        self._ended: asyncio.Future[ProcessDiedError] = asyncio.get_running_loop().create_future()
        self._link: FrameLink[link.ToWorker]

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def start(self) -> None:
        if self._scene.broken_starts:
            self._scene.broken_starts -= 1
            raise RunError("no_room", "no node has room")
        self._link = await FrameLink.open(self._socket, link.ToWorker, self._take)

    def _take(self, message: Any) -> None:
        self.heard.append(message)
        match message:
            case link.Start():
                self._link.send(link.Ready())
            case link.Ping() if not self._scene.mute:
                self._link.send(link.Pong())
            case link.Update(begins=True) if not self._scene.mute:
                self._link.send(link.Acknowledged(number=message.number))
            case link.Work():
                self.held += message.issues
                if not self._scene.holds:
                    self.release()

    def release(self) -> None:
        """Answer what is held."""
        for issue in self.held:
            result = answer(f"{self.name}-{issue.number}", 3)
            records = EngineRecords()
            records.add(str(result.request_id), result)
            told = link.Told(
                records=records.take(),
                capture_s=0.0,
                counts=RouterCounts(reissued=1),
                serving=1,
                outstanding_tokens=0,
                counted={},
            )
            made = trajectory(result, index=issue.prompt_index, member=issue.member)
            self._link.send(told)
            self._link.send(link.Made(number=issue.number, trajectories=(made,)))
        self.held = []

    async def die(self) -> None:
        """As if it were killed."""
        if not self._ended.done():
            self._ended.set_result(ProcessDiedError(self.name, "was killed by SIGKILL", self.log, "last words"))
        await self._link.close()

    async def hang_up(self) -> None:
        """Only the connection ends."""
        await self._link.close()

    async def died(self) -> ProcessDiedError:
        return await asyncio.shield(self._ended)

    def death(self) -> ProcessDiedError:
        return self._ended.result()

    def crash(self, why: str) -> None:
        self.crashes.append(why)
        if not self._ended.done():
            self._ended.set_result(ProcessDiedError(self.name, f"was killed by the run: {why}", self.log, ""))

    async def stop(self, timeout_s: float) -> None:
        if hasattr(self, "_link"):
            await self._link.close()


class Scene:
    """A run's workers, and everything that was ever started."""

    def __init__(self, count: int, *words: str) -> None:
        self.holds = self.mute = False
        self.broken_starts = 0
        self.made: list[Worker] = []
        self.events: list[str] = []
        self.failed: list[RunError] = []
        self.records = EngineRecords()
        config = config_for(RECIPE, parse(["--runtime.rollout_workers", str(count), *words], ()))
        self.workers = RolloutWorkers(
            self._make,
            count,
            start=start_message(config, "auto", Path("/model"), lockstep=False),
            engines=[("http://a", "http://a"), ("http://b", "http://b")],
            records=self.records,
            config=config,
            notice_s=0.2,
            on_event=self.events.append,
        )
        self.workers.on_failed = self.failed.append
        self.workers.launch()

    def _make(self, index: int) -> Linked:
        ours, theirs = socket.socketpair()
        self.made.append(Worker(self, index, theirs))
        return Linked(self.made[-1], ours)

    def ask(self, member: int = 0) -> asyncio.Task[list[Trajectory]]:
        return asyncio.ensure_future(self.workers.training(TASK, member, 0))  # type: ignore[arg-type]


@pytest.fixture
async def scenes() -> AsyncIterator[list[Scene]]:
    made: list[Scene] = []
    yield made
    for scene in made:
        await scene.workers.close()


async def opened(scenes: list[Scene], count: int, *words: str) -> Scene:
    scene = Scene(count, *words)
    scenes.append(scene)
    await scene.workers.start()
    return scene


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a test looks from outside
            await asyncio.sleep(0.001)


async def test_answers_go_where_least_is_under_way_and_their_records_come_first(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 3)
    scene.holds = True
    asked = [scene.ask(member) for member in range(7)]
    await until(lambda: sum(len(w.held) for w in scene.made) == 7)
    assert [len(worker.held) for worker in scene.made] == [3, 2, 2]
    scene.made[1].release()
    await until(lambda: sum(a.done() for a in asked) == 2)
    assert scene.records.tokens_sampled == 6
    more = [scene.ask(member) for member in range(2)]
    await until(lambda: len(scene.made[1].held) == 2)
    for worker in scene.made:
        worker.release()
    for made in [*asked, *more]:
        (found,) = await made
        assert found.identity.prompt_index == 7
    assert scene.records.tokens_sampled == 27
    assert scene.workers.take_metrics()["router/reissued_turns"] == 9


async def test_a_killed_worker_is_replaced_and_its_answers_are_made_elsewhere(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 2)
    scene.workers.set_version(4)
    scene.workers.quarantine("http://a", "dead")
    scene.holds = True
    asked = [scene.ask(member) for member in range(4)]
    await until(lambda: sum(len(w.held) for w in scene.made) == 4)
    await scene.made[0].die()
    await until(lambda: len(scene.made) == 3 and scene.made[2].heard)
    assert scene.workers.counts.reissued == 2
    await until(lambda: "rollout worker rollout-0 is back" in scene.events)
    assert scene.events[0] == "rollout worker rollout-0 was killed by SIGKILL; starting it again"
    quarantined = EngineState(url="http://a", address="http://a", quarantine="dead")
    state = FleetState(engines=(quarantined, EngineState(url="http://b", address="http://b")), version=4, updates=0)
    await until(lambda: state in scene.made[2].heard)
    kinds = [type(message) for message in scene.made[2].heard]
    assert kinds[:2] == [link.Start, FleetState], "it knows the fleet before it has work"
    await scene.workers.readmit("http://a", "http://moved")
    await until(lambda: scene.made[2].heard[-1] == link.Readmit(url="http://a", address="http://moved"))
    scene.made[1].release()
    members = sorted([(await made)[0].identity.member for made in asked])
    assert members == [0, 1, 2, 3]
    assert scene.workers.take_metrics()["router/rollout_worker_restarts"] == 1


async def test_an_answer_that_ends_its_worker_does_not_end_them_all(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 3)
    scene.holds = True
    asked = scene.ask()
    await until(lambda: scene.made[0].held)
    await scene.made[0].die()
    await until(lambda: any(w.held for w in scene.made[1:]))
    await next(w for w in scene.made[1:] if w.held).die()
    with pytest.raises(WorkerLostError, match="was lost"):
        await asked


async def test_while_no_worker_is_there_answers_wait_for_one(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 1)
    scene.broken_starts = 1
    await scene.made[0].die()
    await until(lambda: scene.events)
    (found,) = await scene.ask()
    assert found.identity.prompt_index == 7
    assert "rollout worker rollout-0 could not be brought back: no node has room" in scene.events
    assert scene.workers.counts.restarts == 2


async def test_when_restarts_are_used_up_the_run_ends_by_name_with_the_last_worker(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 2, "--runtime.rollout_restarts", "0")
    await scene.made[0].die()
    await until(lambda: any("is given up" in event for event in scene.events))
    assert not scene.failed
    await scene.ask()
    await scene.made[1].die()
    await until(lambda: scene.failed)
    assert (scene.failed[0].reason, scene.failed[0].resumable) == ("process_died", True)
    assert "process rollout-1 was killed by SIGKILL" in str(scene.failed[0])
    assert "runtime.rollout_restarts" in str(scene.failed[0])


async def test_an_update_begins_only_when_every_worker_knows(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 2)
    async with scene.workers.updating():
        begun = [[m for m in w.heard if isinstance(m, link.Update)] for w in scene.made]
        assert [[m.begins for m in one] for one in begun] == [[True], [True]]
        # One that is started meanwhile learns it with everything else.
        await scene.made[1].die()
        await until(lambda: len(scene.made) == 3 and any(isinstance(m, FleetState) for m in scene.made[2].heard))
        assert next(m for m in scene.made[2].heard if isinstance(m, FleetState)).updates == 1
        await until(lambda: "rollout worker rollout-1 is back" in scene.events)
    scene.workers.set_version(1)
    for worker in (scene.made[0], scene.made[2]):
        await until(lambda worker=worker: link.Version(version=1) in worker.heard)
        said = [m for m in worker.heard if isinstance(m, link.Update | link.Version)]
        assert not said[-2].begins


async def test_a_worker_that_hangs_holds_up_an_update_no_longer_than_it_may(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 1, "--runtime.rollout_hang_s", "0.4")
    scene.mute = True
    async with scene.workers.updating():
        assert "it hung, without a word for 0.4 s (runtime.rollout_hang_s)" in scene.made[0].crashes
    scene.mute = False
    await until(lambda: "rollout worker rollout-0 is back" in scene.events)
    await scene.ask()


async def test_a_worker_that_hangs_up_is_ended(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 1)
    await scene.made[0].hang_up()
    await until(lambda: "rollout worker rollout-0 is back" in scene.events)
    assert scene.made[0].crashes == ["it closed its connection"]


async def test_a_task_that_cannot_be_sent_fails_alone(scenes: list[Scene]) -> None:
    scene = await opened(scenes, 1)
    odd = msgspec.structs.replace(TASK, metadata={"set": object()})
    with pytest.raises(EpisodeFailedError, match="cannot be sent to a rollout worker") as caught:
        await scene.workers.evaluation(odd, 0, 0)
    assert caught.value.kind == "WireError"
    await scene.ask()


async def test_a_worker_that_does_not_start_ends_the_run(scenes: list[Scene]) -> None:
    scene = Scene(1)
    scenes.append(scene)
    scene.broken_starts = 1
    with pytest.raises(RunError, match="no node has room"):
        await scene.workers.start()
