"""A process below an actor, supervised like a child: the fleet does not see that it runs elsewhere.

    no actor --reserve--> placed --start--> running --(child ends)--> placed
                 ^                              `---(actor or node lost)--> no actor

A child that ended is started again by the same actor, at the same address unless somebody else listens there now.
When the actor is lost, alone or with its node, a new one is placed in the same bundle, which Ray moves to another node
when it has to; the address then changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from miles_contracts import InvalidFieldError
from miles_loop.errors import ProcessDiedError, RunError
from miles_loop.processes import TAIL_LINES, ProcessSpec
from miles_loop.ray_runtime.supervisor import Place

_log = logging.getLogger(__name__)
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Settled:
    """What an actor is to run, and where that will answer (None for a process that nobody calls)."""

    spec: ProcessSpec
    url: str | None = None


MakeActor = Callable[[], Any]
"""Asks Ray for a supervisor in the process's bundle; returns its handle at once."""
Settle = Callable[[Any, Place], Awaitable[Settled]]
"""(actor, where it is) -> what to run there; called anew for every new actor and when somebody has taken its port, and
free to refuse a node."""
Nodes = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""The nodes of the cluster, as `ray.nodes()` describes them."""


class ActorProcess:
    """One process of a run, somewhere on the cluster.

    Args:
        name: of the process.
        log: file that it writes to, in a folder that all nodes see.
        make: makes the actor.
        settle: decides what runs, once it is known where.
        nodes: what Ray says of the cluster's nodes.
        deadline_s: of placing the actor, which takes as long as the cluster needs to find room.
    """

    def __init__(
        self, name: str, log: Path, *, make: MakeActor, settle: Settle, nodes: Nodes, deadline_s: float
    ) -> None:
        self.name = name
        self.log = log
        self._make = make
        self._settle = settle
        self._nodes = nodes
        self._deadline_s = deadline_s
        self._reserving = asyncio.Lock()
        self._actor: Any = None
        self._place: Place | None = None
        self._settled: Settled | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[ProcessDiedError] | None = None
        self._stopping = False

    @property
    def place(self) -> Place:
        """Where the actor is, or was last."""
        assert self._place is not None
        return self._place

    @property
    def url(self) -> str | None:
        """Where the process answers, once it is settled; another address after it had to move."""
        return None if self._settled is None else self._settled.url

    @property
    def running(self) -> bool:
        """True from start until the process is known to have ended."""
        return self._ended is not None and not self._ended.done()

    async def reserve(self) -> None:
        """Have an actor placed, when there is none, and settle what it will run.

        Raises:
            RunError: `no_room`, Ray placed none in time.
            InvalidFieldError: the node cannot be used.
        """
        async with self._reserving:
            if self._actor is None:
                self._actor, self._place, self._settled = await self._placed()

    async def _placed(self) -> tuple[Any, Place, Settled]:
        problem: RayActorError | None = None
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    actor = self._make()
                    try:
                        place = await actor.place.remote()
                        return actor, place, await self._settle(actor, place)
                    except RayActorError as error:  # for example: Ray has not noticed yet that the node is gone
                        problem = error
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            why = f"; the last attempt: {_first_line(problem)}" if problem is not None else ""
            raise RunError(
                "no_room",
                f"Ray found no place for {self.name} within {self._deadline_s:g} s{why}; add a node, or raise "
                "runtime.ray.placement_timeout_s",
            ) from None

    async def start(self) -> None:
        """Start it, again when it has ended; waits for a new actor when the old one is lost.

        Raises:
            RunError: no place for it that can be used, or its actor was lost while it started.
            InvalidFieldError: the first node cannot be used.
            DiskFullError: no room for its log.
        """
        try:
            await self.reserve()
            if await self.displaced():
                self._settled = await self._settle(self._actor, self.place)
        except InvalidFieldError as error:
            if self._ended is None:
                raise
            # Not the fault of a setting: it was fine for the node that is gone.
            raise RunError("no_room", f"{self.name} cannot run where Ray placed it now: {error}") from error
        assert self._settled is not None
        actor, self._stopping = self._actor, False
        try:
            await actor.start.remote(self._settled.spec, str(self.log))
        except RayActorError as error:
            self._actor = None
            raise RunError("process_died", f"{self.name} was lost while it started: {_first_line(error)}") from error
        self._ended = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch(actor, self._ended), name=f"ray-{self.name}")

    async def _watch(self, actor: Any, ended: asyncio.Future[ProcessDiedError]) -> None:
        while True:
            try:
                how, tail = await actor.died.remote()
                break
            except ActorUnavailableError as error:
                # Out of reach is not dead: Ray decides, and says so.
                _log.warning("the actor of %s is out of reach: %s", self.name, _first_line(error))
                await asyncio.sleep(_RETRY_S)
            except RayActorError as error:
                how, tail = await self._loss(error), self._tail()
                self._actor = None
                break
        if not ended.done():
            ended.set_result(ProcessDiedError(self.name, how, self.log, tail))

    async def _loss(self, error: RayActorError) -> str:
        nodes = {node["NodeID"]: node["Alive"] for node in await self._nodes()}
        if not nodes.get(self.place.node_id, False):
            return f"was lost with its node {self.place}"
        return f"was lost with its actor on {self.place}: {_first_line(error)}"

    def _tail(self) -> str:
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])

    async def displaced(self) -> bool:
        """Whether it ended and somebody else listens where it should; not known of a lost actor."""
        if self._actor is None:
            return False
        try:
            return bool(await self._actor.displaced.remote())
        except RayActorError:
            return False

    async def died(self) -> ProcessDiedError:
        """Wait until it ends without having been told to; never returns for a stopped one."""
        assert self._ended is not None
        death = await asyncio.shield(self._ended)
        if self._stopping:
            await asyncio.Event().wait()
        return death

    def death(self) -> ProcessDiedError:
        """How it ended, with the end of its log."""
        assert self._ended is not None
        return self._ended.result()

    def crash(self, why: str) -> None:
        """Kill it as if it had died by itself: whoever waits for `died` is told, with the run's reason `why`."""
        if self._actor is not None:
            self._actor.crash.remote(why)

    async def stop(self, timeout_s: float) -> None:
        """End the process; its actor ends with the room that it was given."""
        self._stopping = True
        actor, self._actor = self._actor, None
        if actor is not None:
            try:
                async with asyncio.timeout(2 * timeout_s):
                    await actor.stop.remote(timeout_s)
            except (RayError, TimeoutError) as error:
                _log.warning("%s could not be stopped in order: %s", self.name, _first_line(error))
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)


def _first_line(error: BaseException | None) -> str:
    """Ray's messages run over pages; the line that says why, if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("The actor ")]
    return (telling or lines or [type(error).__name__])[0][:300]
