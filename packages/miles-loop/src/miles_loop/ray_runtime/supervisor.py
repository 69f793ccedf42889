"""The actor that runs one process of a run on the node where Ray put it.

The process is a child of the actor and is started like any child of a driver, guard included (`miles_loop.child`):
when the actor ends, however it ends, the child's whole process group is killed. Ray ends the actor when the driver
is gone, because the driver owns it. So nothing of a run outlives its driver, on any node.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import ray

from miles_loop.ports import Port
from miles_loop.processes import ChildProcess, ProcessSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is."""

    node_id: str
    host: str
    """Address of the node, under which the others reach it."""
    machine: str
    """Name of the machine."""
    pid: int
    """Of the actor."""

    def __str__(self) -> str:
        return f"{self.machine} ({self.host}, node {self.node_id[:8]})"


def node_address() -> str:
    """Address of this node, under which the other nodes reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


class Supervisor:
    """Starts one child, tells how it ended, and ends it."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._port: Port | None = None

    async def place(self) -> Place:
        """Where this actor is."""
        return Place(ray.get_runtime_context().get_node_id(), node_address(), socket.gethostname(), os.getpid())

    async def keep_port(self, host: str) -> int:
        """A port of this node that is kept for the child, instead of the one that was kept before."""
        if self._port is not None:
            self._port.close()
        self._port = Port(host)
        return self._port.number

    async def displaced(self) -> bool:
        """Whether the child has ended and somebody else listens on its port."""
        running = self._child is not None and self._child.running
        return not running and self._port is not None and self._port.taken()

    async def missing(self, paths: list[str]) -> list[str]:
        """Those of the paths that cannot be seen from this node."""
        return [path for path in paths if not Path(path).exists()]  # noqa: ASYNC240 - two stat calls at start-up

    async def leave_mark(self, path: str) -> None:
        """Make an empty file, for others to look for."""
        Path(path).touch()  # noqa: ASYNC240

    async def remove_mark(self, path: str) -> None:
        """Take the mark away."""
        Path(path).unlink(missing_ok=True)  # noqa: ASYNC240

    async def start(self, spec: ProcessSpec, log: str) -> int:
        """Start the child, again when it has ended; its process id.

        Raises:
            DiskFullError: no room for the log.
        """
        self._child = ChildProcess(spec, Path(log))
        await self._child.start()
        return self._child.pid

    async def died(self) -> tuple[str, str]:
        """Wait until the child ends by itself: how, and the end of its log."""
        assert self._child is not None
        death = await self._child.died()
        return death.how, self._child.tail()

    async def crash(self, why: str) -> None:
        """Kill the child as if it had died by itself, with the run's reason."""
        if self._child is not None:
            self._child.crash(why)

    async def stop(self, timeout_s: float) -> None:
        """End the child."""
        if self._child is not None:
            await self._child.stop(timeout_s)
