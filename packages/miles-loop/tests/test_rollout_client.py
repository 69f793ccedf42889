"""The driver's end of a rollout worker's connection, against a worker that says what a test wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from loop_toy.groups import answer, trajectory

from miles_contracts import Message, Task
from miles_loop import rollout_link as link
from miles_loop.errors import RunError
from miles_loop.fleet_view import EngineState, FleetState
from miles_loop.frames import FrameLink
from miles_loop.rollout_client import RolloutClient, WorkerLostError
from miles_rollout.episodes import EpisodeFailedError
from miles_rollout.router.counts import EngineCounts, RouterCounts

START = link.Start(config={}, renderer="auto", model="m", paths=(), folder="/", lockstep=True)
TRAINING, EVALUATION = link.Purpose.TRAINING, link.Purpose.EVALUATION


def task(index: int = 0) -> Task:
    return Task(prompt_index=index, messages=(Message(role="user", content="hi"),), label=[1, 2], source="s")


def told(**changes: Any) -> link.Told:
    plain = link.Told(records={}, capture_s=0.0, counts=RouterCounts(), serving=1, outstanding_tokens=0, counted={})
    return msgspec.structs.replace(plain, **changes)


class Scene:
    """A client, and the worker at the other end."""

    def __init__(self, settles: bool) -> None:
        self.reports: list[link.Told] = []
        self.client = RolloutClient("rollout-0", settles=settles, on_told=self.reports.append)
        self.heard: list[Any] = []
        self.worker: FrameLink[link.ToWorker]

    async def open(self, *first: Any) -> None:
        ours, theirs = socket.socketpair()
        self.worker = await FrameLink.open(theirs, link.ToWorker, self.heard.append)
        for message in first:
            self.worker.send(message)
        await self.client.open(ours, START)

    def make(self, purpose: link.Purpose = TRAINING, index: int = 0) -> asyncio.Task[Any]:
        packed = msgspec.msgpack.encode(task(index))
        return asyncio.ensure_future(self.client.make(purpose, task(index), packed, 3, 1))

    async def work(self, count: int = 1) -> link.Work:
        """The `count`-th message about work."""
        async with asyncio.timeout(30):
            while len(found := [m for m in self.heard if isinstance(m, link.Work)]) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return found[count - 1]

    async def close(self) -> None:
        await self.client.close()
        await self.worker.close()


@pytest.fixture(params=[False, True], ids=["free", "lockstep"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    made = Scene(request.param)
    await made.open(link.Ready())
    yield made
    await made.close()


@pytest.fixture
async def steps() -> AsyncIterator[Scene]:
    """One in lockstep."""
    made = Scene(settles=True)
    await made.open(link.Ready())
    yield made
    await made.close()


async def test_what_is_asked_for_in_one_moment_travels_in_one_message(scene: Scene) -> None:
    asked = [scene.make(index=index) for index in range(5)] + [scene.make(EVALUATION)]
    work = await scene.work()
    assert [issue.prompt_index for issue in work.issues] == [0, 1, 2, 3, 4, 0]
    assert work.in_flight == {TRAINING: 5, EVALUATION: 1}
    first = work.issues[0]
    assert msgspec.msgpack.decode(first.task, type=Task) == task()
    assert (first.member, first.attempt, first.purpose) == (3, 1, TRAINING)
    assert scene.client.outstanding == 6
    made = trajectory(answer("r", 4))
    scene.worker.send(told(serving=7))
    scene.worker.send(link.Made(number=first.number, trajectories=(made,)))
    (found,) = await asked[0]
    assert (found.token_ids == made.token_ids).all()
    assert not found.token_ids.flags.writeable
    assert scene.reports[0].serving == 7
    for waiting in asked[1:]:
        waiting.cancel()


async def test_a_round_is_told_of_only_when_nothing_changes_any_more(steps: Scene) -> None:
    asked = [steps.make(index=index) for index in range(3)]

    async def replace() -> Any:
        await asked[0]
        for _ in range(5):  # a group is judged and dropped, and another prompt takes its place
            await asyncio.sleep(0)
        return await steps.client.make(TRAINING, task(9), b"", 0, 0)

    replaced = asyncio.create_task(replace())
    issues = (await steps.work()).issues
    for issue in issues[:2]:
        steps.worker.send(link.Made(number=issue.number, trajectories=(trajectory(answer("r", 2)),)))
    second = await steps.work(2)
    while not second.issues:  # the two answers may have come in two moments
        assert second.in_flight[TRAINING] == 2
        second = await steps.work(3)
    assert second.in_flight[TRAINING] == 2
    assert [(issue.prompt_index, issue.task) for issue in second.issues] == [(9, b"")]
    replaced.cancel()
    asked[2].cancel()


async def test_an_answer_that_nobody_waits_for_is_cancelled_there(scene: Scene) -> None:
    asked = [scene.make(index=index) for index in range(2)]
    issues = (await scene.work()).issues
    asked[0].cancel()
    work = await scene.work(2)
    assert work.cancelled == (issues[0].number,)
    assert work.in_flight[TRAINING] == 1
    # What comes all the same is dropped, its report is not.
    scene.worker.send(told(serving=5))
    scene.worker.send(link.Made(number=issues[0].number, trajectories=()))
    scene.worker.send(link.Failed(number=issues[1].number, kind="KeyError", message="boom (a.py:3)"))
    with pytest.raises(EpisodeFailedError, match=r"boom \(a\.py:3\)") as caught:
        await asked[1]
    assert caught.value.kind == "KeyError"
    assert [report.serving for report in scene.reports] == [5]


async def test_the_loss_of_a_worker_reaches_everybody_who_waits(scene: Scene) -> None:
    asked = scene.make()
    update = asyncio.create_task(scene.client.acknowledged(4))
    await scene.work()
    await scene.worker.close()
    with pytest.raises(WorkerLostError, match="rollout-0 was lost"):
        await asked
    await update
    with pytest.raises(WorkerLostError, match="is gone"):
        await scene.make()


async def test_an_update_is_acknowledged_under_its_number(scene: Scene) -> None:
    update = asyncio.create_task(scene.client.acknowledged(4))
    scene.worker.send(link.Acknowledged(number=3))
    state = FleetState(engines=(EngineState(url="u", address="a"),), version=None, updates=1)
    scene.client.tell(state)
    async with asyncio.timeout(30):
        while state not in scene.heard:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not update.done()
    scene.worker.send(link.Acknowledged(number=4))
    await update


async def test_a_worker_that_cannot_start_says_why() -> None:
    scene = Scene(settles=False)
    with pytest.raises(RunError, match=r"rollout-0 cannot start: InvalidFieldError: task\.agent: no") as caught:
        await scene.open(link.Refused(kind="InvalidFieldError", message="task.agent: no"))
    assert caught.value.reason == "rollout_worker"
    await scene.close()


async def test_a_worker_that_ends_before_it_is_ready_is_no_riddle() -> None:
    scene = Scene(settles=False)
    opening = asyncio.create_task(scene.open())
    await asyncio.sleep(0.01)
    await scene.worker.close()
    with pytest.raises(RunError, match="ended while it started: "):
        await opening
    await scene.close()


async def test_silence_is_noticed_and_an_answer_ends_it(scene: Scene) -> None:
    async def reply() -> None:
        while True:
            await asyncio.sleep(0.005)
            scene.worker.send(link.Pong())

    replying = asyncio.create_task(reply())
    silent = asyncio.create_task(scene.client.silent(0.4))
    await asyncio.sleep(1.2)
    assert not silent.done()
    replying.cancel()
    async with asyncio.timeout(30):
        await silent
    assert any(isinstance(message, link.Ping) for message in scene.heard)


def test_reports_add_up_to_those_of_one_router() -> None:
    from miles_loop.rollout_counts import WorkerCounts

    counts = WorkerCounts()
    one = RouterCounts(reissued=1, quarantines=0, engines=(EngineCounts(2, 100, 50), EngineCounts(1, 10, 0)))
    two = RouterCounts(reissued=0, quarantines=2, engines=(EngineCounts(3, 100, 0), EngineCounts()))
    counts.add("rollout-0", told(counts=one, serving=2, outstanding_tokens=5, counted={TRAINING: {"x": 1.0}}))
    counts.add("rollout-1", told(counts=two, serving=1, outstanding_tokens=7, counted={TRAINING: {"x": 2.0, "y": 4.0}}))
    counts.reissued = 3
    assert counts.take_routed() == {
        "router/engines_serving": 1.0,
        "router/outstanding_tokens": 12.0,
        "router/reissued_turns": 1.0,
        "router/quarantines": 2.0,
        "router/engine_0/turns": 5.0,
        "router/engine_0/prefix_cache_hit_rate": 0.25,
        "router/engine_1/turns": 1.0,
        "router/engine_1/prefix_cache_hit_rate": 0.0,
        "rollout/prefix_cache_hit_rate": 50 / 210,
        "router/rollout_worker_restarts": 0.0,
        "router/reissued_answers": 3.0,
    }
    assert counts.take_counted(TRAINING) == {"x": 3.0, "y": 4.0}
    assert counts.take_counted(TRAINING) == {"x": 0.0, "y": 0.0}
    assert counts.take_counted(EVALUATION) == {}
    counts.forget("rollout-1")
    after = counts.take_routed()
    assert (after["router/outstanding_tokens"], after["router/reissued_answers"]) == (5.0, 0.0)
