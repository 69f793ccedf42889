"""The driver's end of one rollout worker's connection: answers asked for, answers that came, and its loss.

What the driver asks for in one moment travels in one message, together with how many answers it then waits for. A
worker in lockstep needs both to know when a round is complete, so for it the moment lasts until nothing changes any
more: a group whose last answer has just come may be replaced by a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_contracts import MilesError, Task, Trajectory
from miles_loop import rollout_link as link
from miles_loop.errors import RunError
from miles_loop.fleet_view import FleetState
from miles_loop.frames import FrameLink
from miles_loop.trainer_client import Incoming
from miles_rollout.episodes import EpisodeFailedError

_QUIET_TURNS = 20
"""Turns of the event loop without a change after which a moment is over."""
_SILENT_PARTS = 4
"""A silence counts as a hang when so many parts of it passed one after the other: when this process itself was
stopped for a while, one part passes at most."""


class WorkerLostError(MilesError):
    """The rollout worker that made an answer ended before it was there."""


Answer = Sequence[Trajectory]


@dataclass(slots=True)
class _Call:
    purpose: link.Purpose
    answer: asyncio.Future[Answer]


class RolloutClient:
    """One incarnation of a worker. Open with `open`; `lost` once its connection is over.

    Args:
        name: of the process.
        settles: it is in lockstep.
        on_told: takes what the worker reports beside answers.
    """

    def __init__(self, name: str, *, settles: bool, on_told: Callable[[link.Told], None]) -> None:
        self.name = name
        self._settles = settles
        self._on_told = on_told
        self._link: FrameLink[link.ToDriver] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._issues: list[link.Issue] = []
        self._cancelled: list[int] = []
        self._changes = 0
        self._sending: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[RunError | None] = asyncio.get_running_loop().create_future()
        self._acknowledged = asyncio.Event()
        self._heard_of = -1
        self.lost = asyncio.Event()

    @property
    def outstanding(self) -> int:
        """Answers that are waited for."""
        return len(self._calls)

    @property
    def opened(self) -> bool:
        """Whether the connection has been made."""
        return self._link is not None

    async def open(self, connection: socket.socket | Incoming, start: link.Start) -> None:
        """Wait for the worker's connection and have it load what it needs.

        Raises:
            RunError: `rollout_worker`: it cannot, or its connection broke.
        """
        sock = connection if isinstance(connection, socket.socket) else await connection.accept()
        self._link = await FrameLink.open(sock, link.ToDriver, self._take)
        self._link.ended.add_done_callback(self._over)
        self._link.send(start)
        if (problem := await self._ready) is not None:
            raise problem

    async def close(self) -> None:
        """End the connection; whoever waits for an answer is told that the worker is lost."""
        self._drop("it was ended")
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    # -- the fleet's words ----------------------------------------------------------------------------------

    def tell(self, word: FleetState | link.Update | link.Version | link.Quarantine | link.Readmit) -> None:
        """Pass on what the routers have to know, at once: it may overtake answers that were asked for just now."""
        assert self._link is not None
        self._link.send(word)

    async def acknowledged(self, number: int) -> None:
        """Wait until the worker has acted on the update of this number, or is lost."""
        while self._heard_of < number and not self.lost.is_set():
            self._acknowledged.clear()
            await self._acknowledged.wait()

    async def silent(self, hang_s: float) -> None:
        """Wait until the worker has said nothing for `hang_s` although it was asked."""
        assert self._link is not None
        parts = 0
        while parts < _SILENT_PARTS:
            heard = self._link.received
            self._link.send(link.Ping())
            await asyncio.sleep(hang_s / _SILENT_PARTS)
            parts = parts + 1 if self._link.received == heard else 0

    # -- answers --------------------------------------------------------------------------------------------

    async def make(self, purpose: link.Purpose, task: Task, packed: bytes, member: int, attempt: int) -> Answer:
        """One answer.

        Args:
            purpose: what it is for.
            task: the prompt.
            packed: the same as msgpack, empty where the worker makes the task itself.
            member: of its group.
            attempt: try at it.

        Raises:
            WorkerLostError: the worker ended before.
            EpisodeFailedError: what the making of it raised.
        """
        if self.lost.is_set():
            raise WorkerLostError(f"{self.name} is gone")
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = _Call(purpose, answer)
        self._issues.append(
            link.Issue(
                number=number,
                purpose=purpose,
                prompt_index=task.prompt_index,
                task=packed,
                member=member,
                attempt=attempt,
            )
        )
        self._changed()
        try:
            return await answer
        finally:
            if self._calls.pop(number, None) is not None and not self.lost.is_set():
                self._cancelled.append(number)  # nobody waits for it any more
                self._changed()

    def _changed(self) -> None:
        self._changes += 1
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_soon(), name=f"{self.name}-work")

    async def _send_soon(self) -> None:
        await asyncio.sleep(0)
        quiet, seen = 0, self._changes
        while self._settles and quiet < _QUIET_TURNS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._changes == seen else 0
            seen = self._changes
        self._flush()

    def _flush(self) -> None:
        """Send what has been asked for, and how much is waited for."""
        if self._link is None or self.lost.is_set():
            return
        issues, self._issues = self._issues, []
        cancelled, self._cancelled = self._cancelled, []
        in_flight = dict.fromkeys(link.Purpose, 0)
        for call in self._calls.values():
            in_flight[call.purpose] += 1
        wanted = tuple(issue for issue in issues if issue.number in self._calls)
        self._link.send(link.Work(issues=wanted, cancelled=tuple(cancelled), in_flight=in_flight))

    # -- what the worker says -------------------------------------------------------------------------------

    def _take(self, message: link.ToDriver) -> None:
        match message:
            case link.Ready():
                self._settle(None)
            case link.Refused():
                self._settle(RunError("rollout_worker", f"{self.name} cannot start: {message.kind}: {message.message}"))
            case link.Acknowledged():
                self._heard_of = max(self._heard_of, message.number)
                self._acknowledged.set()
            case link.Told():
                self._on_told(message)
            case link.Made():
                if (call := self._ended(message.number)) is not None:
                    call.set_result(message.trajectories)
            case link.Failed():
                if (call := self._ended(message.number)) is not None:
                    call.set_exception(EpisodeFailedError(message.kind, message.message))
            case link.Pong():
                pass  # that it came is all

    def _settle(self, problem: RunError | None) -> None:
        if not self._ready.done():
            self._ready.set_result(problem)

    def _ended(self, number: int) -> asyncio.Future[Answer] | None:
        """The future of an answer that came; None when nobody waits for it any more."""
        call = self._calls.pop(number, None)
        if self._settles:
            self._changed()  # a round may be complete without it
        return None if call is None or call.answer.done() else call.answer

    def _over(self, ended: asyncio.Future[str]) -> None:
        self._drop(ended.result())

    def _drop(self, why: str) -> None:
        self.lost.set()
        self._acknowledged.set()
        self._settle(RunError("rollout_worker", f"{self.name} ended while it started: {why}"))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(WorkerLostError(f"{self.name} was lost: {why}"))
