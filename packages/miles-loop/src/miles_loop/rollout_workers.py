"""The rollout workers of a run: processes that make answers, given work, told of the fleet, brought back when they die.

    driver:  loop, scheduler, buffer, ledger, audit, group rewards
       |  one connection each (miles_loop.rollout_link)
    worker:  renderer, session server, agents, rewards, router and clients of the engines

An answer goes to the worker with the fewest under way and stays there. When a worker is lost, its answers are asked
for again elsewhere, once: the same prompt, member, attempt and hence seeds. A worker that comes back is given the
fleet as it is before it is given work.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from miles_contracts import DeadlineExceededError, MilesError, Task, Trajectory
from miles_loop import rollout_link as link
from miles_loop.audit import EngineRecords
from miles_loop.config import RunConfig, TaskSourceKind
from miles_loop.errors import ProcessDiedError, RunError
from miles_loop.fleet_view import FleetView
from miles_loop.hosts import Linked
from miles_loop.late import PROCESS_LATE_S, said_when_late
from miles_loop.processes import Process, ProcessSpec
from miles_loop.rollout_client import RolloutClient, WorkerLostError
from miles_loop.rollout_counts import WorkerCounts
from miles_rollout.episodes import EpisodeFailedError

_ISSUES = 2
"""Times that one answer is asked for when workers are lost: an answer that ends its worker must not end them all."""


def worker_name(index: int) -> str:
    """Name of the process."""
    return f"rollout-{index}"


def rollout_spec(config: RunConfig, index: int, where: str) -> ProcessSpec:
    """Process of one rollout worker; `where` is how it reaches the driver (see `rollout_process`)."""
    return ProcessSpec(name=worker_name(index), module="miles_loop.rollout_process", arguments=(where,))


def start_message(config: RunConfig, renderer: str, model: Path, *, lockstep: bool) -> link.Start:
    """What a rollout worker is told first."""
    here = os.getcwd()
    return link.Start(
        config=config.model_dump(mode="json"),
        renderer=renderer,
        model=str(model),
        paths=tuple(os.path.join(here, path) for path in sys.path),
        folder=here,
        lockstep=lockstep,
    )


class RemoteGenerate:
    """A `miles_contracts.Generate` whose answers are made by the workers."""

    def __init__(self, workers: RolloutWorkers, purpose: link.Purpose) -> None:
        self._workers = workers
        self._purpose = purpose

    async def __call__(self, task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        """One answer."""
        return await self._workers.make(self._purpose, task, member, attempt)

    def take_metrics(self) -> dict[str, float]:
        """What the making of answers counted since the last call."""
        return self._workers.counts.take_counted(self._purpose)


class RolloutWorkers:
    """Also the fleet's `Routing`: what it says is passed on to every worker's routers.

    Args:
        make: the process of a worker by its index, new for every start of it, and its connection.
        count: of workers.
        start: what each is told first.
        engines: name and address of each engine, in order.
        records: what engines answer to training is recorded here.
        config: of the run.
        notice_s: how long it may take until the end of a process is known.
        on_event: told, in words, what happened to workers.

    Attributes:
        on_failed: told why the run cannot go on, when the last worker is given up.
    """

    def __init__(
        self,
        make: Callable[[int], Linked],
        count: int,
        *,
        start: link.Start,
        engines: Sequence[tuple[str, str]],
        records: EngineRecords,
        config: RunConfig,
        notice_s: float,
        on_event: Callable[[str], None],
    ) -> None:
        self._make_process = make
        self._start = start
        self._view = FleetView(engines)
        self._records = records
        self._hang_s = config.runtime.rollout_hang_s
        self._start_timeout_s = config.engine.start_timeout_s
        self._stop_timeout_s = config.runtime.stop_timeout_s
        self._notice_s = notice_s
        self._on_event = on_event
        # What a task family makes is more than plain data (tuples, say); every worker can make the same.
        self._sends_tasks = config.task.source is not TaskSourceKind.REASONING_GYM
        self._restarts_left = [config.runtime.rollout_restarts] * count
        self._processes: list[Process | None] = [None] * count
        self._clients: list[RolloutClient | None] = [None] * count
        """By index; None while a worker is not ready, or given up."""
        self._starting: list[asyncio.Task[RolloutClient]] = []
        self._supervisors: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self.counts = WorkerCounts()
        self.on_failed: Callable[[RunError], None] = lambda _: None
        self.training = RemoteGenerate(self, link.Purpose.TRAINING)
        self.evaluation = RemoteGenerate(self, link.Purpose.EVALUATION)

    # -- life -----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start every process; `start` waits for them."""
        self._starting = [
            asyncio.create_task(self._bring_up(index), name=f"start-{worker_name(index)}")
            for index in range(len(self._clients))
        ]

    async def start(self) -> None:
        """Wait until every worker is ready, tell each of the fleet, and watch over them.

        Raises:
            ProcessDiedError, RunError: naming the worker and why it did not start.
            DeadlineExceededError: one was not ready in time.
        """
        clients = await asyncio.gather(*self._starting)
        for index, client in enumerate(clients):
            self._admit(index, client)
            self._supervisors.append(
                asyncio.create_task(self._supervise(index, client), name=f"watch-{worker_name(index)}")
            )

    async def close(self) -> None:
        """End connections and processes."""
        tasks = [*self._starting, *self._supervisors]
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        # Those that came up before the run got as far as to use them are there, too.
        clients = {client for client in (*ended, *self._clients) if isinstance(client, RolloutClient)}
        await asyncio.gather(*(client.close() for client in clients))
        await asyncio.gather(*(p.stop(self._stop_timeout_s) for p in self._processes if p is not None))

    async def _bring_up(self, index: int) -> RolloutClient:
        """A worker that is ready and knows nothing of the fleet yet."""
        hosted = self._make_process(index)
        process = self._processes[index] = hosted.process
        client = RolloutClient(process.name, settles=self.in_step, on_told=partial(self._told, process.name))
        text = f"process {process.name} is not ready yet; see {process.log}; waiting up to {self._start_timeout_s:g} s"
        tasks: list[asyncio.Task[None]] = []
        try:
            await process.start()
            died = asyncio.create_task(_raise_death(process))
            opened = asyncio.create_task(client.open(hosted.connection, self._start))
            tasks += [died, opened]
            async with (
                said_when_late(self._on_event, f"{text} (engine.start_timeout_s)", PROCESS_LATE_S),
                asyncio.timeout(self._start_timeout_s),
            ):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not died.done() and client.lost.is_set():
                    # A broken connection is noticed before the dead process is: its death is the better reason.
                    await asyncio.wait((died,), timeout=self._notice_s)
            for task in (died, opened):
                if task.done():
                    task.result()
        except TimeoutError:
            await _let_go(hosted, client)
            remedy = f"see {process.log}, or raise engine.start_timeout_s"
            raise DeadlineExceededError(f"rollout worker {process.name}", self._start_timeout_s, remedy) from None
        except BaseException:  # no process stays behind, whatever ended this
            await _let_go(hosted, client)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return client

    def _admit(self, index: int, client: RolloutClient) -> None:
        """Give a worker the fleet as it is; from then on it hears every word."""
        client.tell(self._view.state)
        self._clients[index] = client
        self._notify()

    async def _supervise(self, index: int, client: RolloutClient) -> None:
        """Bring one worker back whenever it is lost, as often as allowed."""
        current: RolloutClient | None = client
        while True:
            death = await self._lost(index, current)
            self._clients[index] = None
            self.counts.forget(worker_name(index))
            if current is not None:
                await current.close()
            if not self._restarts_left[index]:
                self._give_up(index, death)
                return
            self._restarts_left[index] -= 1
            self.counts.restarts += 1
            self._on_event(f"rollout worker {worker_name(index)} {death.how}; starting it again")
            current = None
            try:
                await self._stop(index)
                current = await self._bring_up(index)
                self._admit(index, current)
                self._on_event(f"rollout worker {worker_name(index)} is back")
            except (MilesError, OSError) as error:
                self._on_event(f"rollout worker {worker_name(index)} could not be brought back: {error}")

    async def _lost(self, index: int, client: RolloutClient | None) -> ProcessDiedError:
        """Wait until a worker is lost; its process has ended then, or is out of reach."""
        process = self._processes[index]
        assert process is not None
        if client is None:  # it did not even start
            process.crash("it could not be brought back")
            return ProcessDiedError(process.name, "could not be brought back", process.log, "")
        died = asyncio.create_task(process.died())
        gone = asyncio.create_task(client.lost.wait())
        silent = asyncio.create_task(client.silent(self._hang_s))
        try:
            await asyncio.wait((died, gone, silent), return_when=asyncio.FIRST_COMPLETED)
            self._clients[index] = None  # nothing new goes there
            if died.done():
                return died.result()
            if silent.done() and not gone.done():
                process.crash(f"it hung, without a word for {self._hang_s:g} s (runtime.rollout_hang_s)")
                await client.close()
            await asyncio.wait((died,), timeout=self._notice_s)
            if not died.done():
                process.crash("it closed its connection")
                await asyncio.wait((died,), timeout=self._notice_s)
            if died.done():
                return died.result()
            return ProcessDiedError(process.name, "is out of reach", process.log, "")
        finally:
            for task in (died, gone, silent):
                task.cancel()
            await asyncio.gather(died, gone, silent, return_exceptions=True)

    async def _stop(self, index: int) -> None:
        process = self._processes[index]
        if process is not None:
            await process.stop(self._stop_timeout_s)

    def _give_up(self, index: int, death: ProcessDiedError) -> None:
        """The run goes on while another worker does."""
        remedy = "its restarts (runtime.rollout_restarts) are used up"
        if any(task is not asyncio.current_task() and not task.done() for task in self._supervisors):
            self._on_event(f"rollout worker {worker_name(index)} is given up, {remedy}: {death.how}")
            return
        self.on_failed(death.advised(f"no rollout worker is left, and {remedy}; see its log, then train --resume"))

    # -- answers --------------------------------------------------------------------------------------------

    async def make(self, purpose: link.Purpose, task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        """One answer, made by the worker with the fewest under way.

        Raises:
            EpisodeFailedError: what the making of it raised, or a task that cannot be sent.
            WorkerLostError: two workers were lost over it.
        """
        packed = b""
        if self._sends_tasks:
            try:
                packed = msgspec.msgpack.encode(task)
            except (TypeError, OverflowError, ValueError) as error:
                raise EpisodeFailedError(
                    "WireError", f"the task cannot be sent to a rollout worker: {error}"
                ) from error
        for issue in range(_ISSUES):
            client = await self._least_loaded()
            try:
                return await client.make(purpose, task, packed, member, attempt)
            except WorkerLostError:
                if issue == _ISSUES - 1:
                    raise
                self.counts.reissued += 1
        raise AssertionError("unreachable: the last issue returns or raises")

    async def _least_loaded(self) -> RolloutClient:
        while not (ready := [c for c in self._clients if c is not None and not c.lost.is_set()]):
            self._changed.clear()
            await self._changed.wait()
        return min(ready, key=lambda client: client.outstanding)

    def _notify(self) -> None:
        self._changed.set()

    def _told(self, name: str, told: link.Told) -> None:
        self._records.absorb(told.records, told.capture_s)
        self.counts.add(name, told)

    # -- routing --------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether requests go out in rounds."""
        return self._start.lockstep

    def set_version(self, version: int) -> None:
        """Engines must serve `version` from now on."""
        self._view.set_version(version)
        self._tell(link.Version(version=version))

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """While weights change. Entered when every worker has said that it knows, or is lost; one that says nothing
        is killed after `runtime.rollout_hang_s`."""
        number = next(self._numbers)
        self._view.update_begins()
        try:
            self._tell(link.Update(begins=True, number=number))
            await asyncio.gather(*(client.acknowledged(number) for client in self._listening))
            yield
        finally:
            self._view.update_ends()
            self._tell(link.Update(begins=False, number=number))

    def quarantine(self, url: str, reason: str) -> None:
        """Take an engine out of service."""
        self._view.quarantine(url, reason)
        self._tell(link.Quarantine(url=url, reason=reason))

    async def readmit(self, url: str, address: str) -> None:
        """An engine has the current weights and may serve; it answers at `address`."""
        self._view.readmit(url, address)
        self._tell(link.Readmit(url=url, address=address))

    def take_metrics(self) -> dict[str, float]:
        """What all workers routed of training since the last call, and what became of workers."""
        return self.counts.take_routed() | {"router/rollout_workers": float(len(self._listening))}

    @property
    def _listening(self) -> list[RolloutClient]:
        return [client for client in self._clients if client is not None and not client.lost.is_set()]

    def _tell(self, word: link.Update | link.Version | link.Quarantine | link.Readmit) -> None:
        for client in self._listening:
            client.tell(word)


async def _raise_death(process: Process) -> None:
    raise await process.died()


async def _let_go(hosted: Linked, client: RolloutClient) -> None:
    """Of a worker that did not start."""
    await client.close()
    if not client.opened:
        hosted.connection.close()
