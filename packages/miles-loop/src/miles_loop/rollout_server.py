"""What a rollout worker does: makes the answers that the driver asks for, over routers that hear the driver's words.

Messages are acted on one after the other, in the order in which the driver said them; answers are tasks of their own.
An error of an answer is an answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import traceback
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import Generate, Task, wire
from miles_loop import rollout_link as link
from miles_loop.audit import EngineRecords
from miles_loop.compose import make_tasks
from miles_loop.config import RunConfig, TaskSourceKind
from miles_loop.fleet_view import FleetState
from miles_loop.frames import FrameLink
from miles_loop.generation import Generation
from miles_loop.models import max_context, num_layers
from miles_loop.routing import LocalRouting
from miles_loop.scoring import Counting
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.tasks import TaskSource

_log = logging.getLogger(__name__)
_OFF_LOOP_TOKENS = 2**15
"""Answers with more tokens than these (a megabyte and more, with routes) are encoded in a thread."""
_KEPT_TASKS = 1024
_TASK = msgspec.msgpack.Decoder(Task)


class Loaded:
    """What a run's answers are made of, as the first message says.

    Raises:
        InvalidFieldError and other errors of the house: anything that cannot work, by name.
    """

    def __init__(self, start: link.Start) -> None:
        sys.path += [path for path in start.paths if path not in sys.path]
        self.config = RunConfig.model_validate(start.config)
        self.lockstep = start.lockstep
        model = Path(start.model)
        self.layers = num_layers(model)
        self.generation = Generation(start.renderer, self.config, model, max_context(model))
        self._sources: dict[link.Purpose, TaskSource | None] = {}
        if self.config.task.source is TaskSourceKind.REASONING_GYM:
            tasks = make_tasks(self.config.task, self.config.seed)
            self._sources = {link.Purpose.TRAINING: tasks.train, link.Purpose.EVALUATION: tasks.held_out}
        self.task_at = functools.lru_cache(maxsize=_KEPT_TASKS)(self._task_at)

    def _task_at(self, purpose: link.Purpose, prompt_index: int) -> Task:
        """The task that the driver's own source has there."""
        source = self._sources[purpose]
        assert source is not None
        return source.at(prompt_index)


class RolloutService:
    """State of the process: what was loaded, the routers, and the answers under way."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[link.ToWorker] = asyncio.Queue()
        self._connection: FrameLink[link.ToWorker]
        self._loaded: Loaded
        self._routing: LocalRouting
        self._clients: dict[str, EngineClient] = {}
        self._generates: dict[link.Purpose, Generate] = {}
        self._records = EngineRecords()
        self._updates: list[ExitStack] = []
        self._in_flight = dict.fromkeys(link.Purpose, 0)
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    def take(self, message: link.ToWorker) -> None:
        """A message from the driver."""
        if isinstance(message, link.Ping):
            self._connection.send(link.Pong())
        else:
            self._messages.put_nowait(message)

    async def serve(self, connection: FrameLink[link.ToWorker]) -> None:
        """Answer on this connection until it is over."""
        self._connection = connection
        acting = asyncio.create_task(self._act_on_all())
        try:
            await asyncio.wait((acting, connection.ended), return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                acting.result()
            _log.info("the driver is gone: %s", connection.ended.result())
        finally:
            tasks = [acting, *self._answers.values(), *self._background]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stack.aclose()

    # -- what the driver says -------------------------------------------------------------------------------

    async def _act_on_all(self) -> None:
        while True:
            await self._act(await self._messages.get())

    async def _act(self, message: link.ToWorker) -> None:
        match message:
            case link.Start():
                await self._load(message)
            case FleetState():
                await self._open(message)
            case link.Update(begins=True):
                self._begin_update()
                self._connection.send(link.Acknowledged(number=message.number))
            case link.Update():
                self._updates.pop().close()
            case link.Version():
                self._routing.set_version(message.version)
            case link.Quarantine():
                self._routing.quarantine(message.url, message.reason)
            case link.Readmit():
                await self._move(message.url, message.address)
                # Health checks take as long as engines let them; what is said next does not wait for them.
                self._in_background(self._routing.readmit(message.url, message.address))
            case link.Work():
                self._work(message)

    async def _load(self, start: link.Start) -> None:
        if os.path.isdir(start.folder):  # noqa: ASYNC240 - one stat call at start-up
            os.chdir(start.folder)
        else:
            _log.warning("the driver's folder %s is not here: relative paths mean something else", start.folder)
        try:
            self._loaded = await asyncio.to_thread(Loaded, start)
        except Exception as error:  # noqa: BLE001 - request boundary: the driver is told why, and ends this process
            traceback.print_exc()
            self._connection.send(link.Refused(kind=type(error).__name__, message=str(error)))
        else:
            self._connection.send(link.Ready())

    async def _open(self, state: FleetState) -> None:
        """Make the routers, as all the driver's words so far would have made them."""
        loaded, config = self._loaded, self._loaded.config
        deadlines = Deadlines(generate=config.rollout.timeout_s, weights=config.sync.deadline_s)
        for engine in state.engines:
            client = EngineClient(engine.url, deadlines=deadlines, routing_layers=loaded.layers)
            self._clients[engine.url] = await self._stack.enter_async_context(client)
            await self._move(engine.url, engine.address)
        self._routing = LocalRouting(
            list(self._clients.values()), self._records, config.router, lockstep=loaded.lockstep
        )
        for lockstep, purpose in (
            (self._routing.lockstep, link.Purpose.TRAINING),
            (self._routing.evaluation_lockstep, link.Purpose.EVALUATION),
        ):
            if lockstep is not None:
                lockstep.in_flight = functools.partial(self._in_flight.__getitem__, purpose)
        if state.version is not None:
            self._routing.set_version(state.version)
        for engine in state.engines:
            if engine.quarantine is not None:
                self._routing.quarantine(engine.url, engine.quarantine)
        for _ in range(state.updates):
            self._begin_update()
        await self._routing.start()
        self._stack.push_async_callback(self._routing.close)
        making = loaded.generation
        self._generates = {
            link.Purpose.TRAINING: await self._stack.enter_async_context(making.training(self._routing.router)),
            link.Purpose.EVALUATION: await self._stack.enter_async_context(
                making.evaluation(self._routing.evaluation_router)
            ),
        }

    def _begin_update(self) -> None:
        update = ExitStack()
        update.enter_context(self._routing.changing())
        self._updates.append(update)

    async def _move(self, url: str, address: str) -> None:
        client = self._clients[url]
        if client.address != address:
            await client.move_to(address)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- answers --------------------------------------------------------------------------------------------

    def _work(self, work: link.Work) -> None:
        self._in_flight |= work.in_flight
        for number in work.cancelled:
            if (task := self._answers.get(number)) is not None:
                task.cancel()
        for issue in work.issues:
            answer = asyncio.create_task(self._answer(issue), name=f"answer-{issue.prompt_index}-{issue.member}")
            self._answers[issue.number] = answer
            answer.add_done_callback(functools.partial(self._forget, issue.number))

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._answers[number]

    async def _answer(self, issue: link.Issue) -> None:
        try:
            task = _TASK.decode(issue.task) if issue.task else self._loaded.task_at(issue.purpose, issue.prompt_index)
            made = tuple(await self._generates[issue.purpose](task, issue.member, issue.attempt))
            self._connection.send(self._told())
            self._connection.send_parts(await _encoded(link.Made(number=issue.number, trajectories=made)))
        except Exception as error:  # noqa: BLE001 - request boundary: the driver counts it as this episode's failure
            self._connection.send(self._told())
            self._connection.send(link.Failed(number=issue.number, kind=type(error).__name__, message=str(error)))

    def _told(self) -> link.Told:
        router = self._routing.router
        return link.Told(
            records=self._records.take(),
            capture_s=self._records.take_capture_s(),
            counts=router.take_counts(),
            serving=len(router.serving),
            outstanding_tokens=router.outstanding_tokens,
            counted={p: g.take_metrics() for p, g in self._generates.items() if isinstance(g, Counting)},
        )


async def _encoded(message: link.Made) -> list[Any]:
    """Its frame; a large one is made beside the event loop.

    Raises:
        WireError: an agent put something into the trajectory that the format does not know.
    """
    if sum(trajectory.num_tokens for trajectory in message.trajectories) > _OFF_LOOP_TOKENS:
        return await asyncio.to_thread(wire.encode_parts, message)
    return wire.encode_parts(message)
