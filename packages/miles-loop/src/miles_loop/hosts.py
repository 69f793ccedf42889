"""Where the processes of a run are started: this machine, or a cluster.

A host turns specifications into supervised processes and says under which URL each engine answers. What runs, with
which arguments, is not its business.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from miles_loop.ports import choose_ports
from miles_loop.processes import ChildProcess, Process, ProcessSpec
from miles_loop.serving import ServingChild
from miles_loop.trainer_client import Incoming
from miles_loop.zygote import Zygote

EngineSpec = Callable[[int, str, int], ProcessSpec]
"""(index, host to listen on, port) -> the process of that engine."""
LinkedSpec = Callable[[int, str], ProcessSpec]
"""(rank, or index of the rollout worker; how it reaches the driver) -> the process."""


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """An engine that is ready to be started, and the URL it will answer at."""

    url: str
    process: Process


@dataclass(frozen=True, slots=True)
class Linked:
    """A trainer rank or a rollout worker that is ready to be started, and the driver's end of its connection."""

    process: Process
    connection: socket.socket | Incoming


class Host(Protocol):
    """Makes the processes of one run."""

    notice_s: float
    """How long it may take until the end of a process is known: a broken connection is noticed before."""

    async def open(self, *, engines: int, trainer: bool, workers: int = 0) -> None:
        """Find room for so many engines and rollout workers, and for the trainer's ranks when they are to be."""

    def make_trainer(self, rank: int, spec: LinkedSpec) -> Linked:
        """The process of one trainer rank, not started; they are made in order."""

    async def make_engines(self, spec: EngineSpec) -> Sequence[HostedEngine]:
        """The engine processes, not started."""

    def make_worker(self, index: int, spec: LinkedSpec) -> Linked:
        """One rollout worker, not started; made anew for every start, once the one before is stopped."""

    def trainer_address(self) -> str | None:
        """Address of the trainer's machine as engines reach it, once it is placed; None where settings say it."""

    def rank_address(self) -> str:
        """Address of the machine of trainer rank 0 as the other ranks reach it, once it is placed."""

    async def close(self) -> None:
        """Give back what `open` took; the processes have been stopped."""


class LocalHost:
    """This machine: child processes, a socket pair to the trainer.

    Args:
        logs: folder of the processes' logs.
        address: that the engines listen on.
        port: first port, 0 for free ones.
        moves: an engine whose free port somebody has taken after all gets another one.
        zygote: forks the children that it can.
    """

    notice_s = 2.0

    def __init__(
        self, logs: Path, address: str, port: int, *, moves: bool = True, zygote: Zygote | None = None
    ) -> None:
        self._logs = logs
        self._address = address
        self._port = port
        self._moves = moves and port == 0
        self._zygote = zygote
        self._engines = 0

    async def open(self, *, engines: int, trainer: bool, workers: int = 0) -> None:
        """There is always room here."""
        self._engines = engines

    def make_trainer(self, rank: int, spec: LinkedSpec) -> Linked:
        """A child that inherits its end of a socket pair."""
        return self._linked(rank, spec)

    async def make_engines(self, spec: EngineSpec) -> Sequence[HostedEngine]:
        """Children that listen on ports which are kept for them.

        Raises:
            InvalidFieldError: a port that was asked for is taken.
        """
        made: list[HostedEngine] = []
        if not self._engines:
            return made
        for index, port in enumerate(choose_ports(self._address, self._port, self._engines)):

            def make(numbers: Sequence[int], index: int = index) -> ProcessSpec:
                return spec(index, self._address, numbers[0])

            log = self._logs / f"{make([port.number]).name}.log"
            process = ServingChild(make, log, [port], moves=self._moves, zygote=self._zygote)
            made.append(HostedEngine(process.url, process))
        return made

    def make_worker(self, index: int, spec: LinkedSpec) -> Linked:
        """A child that inherits its end of a socket pair."""
        return self._linked(index, spec)

    def _linked(self, number: int, spec: LinkedSpec) -> Linked:
        ours, theirs = socket.socketpair()
        made = spec(number, str(theirs.fileno()))
        log = self._logs / f"{made.name}.log"
        return Linked(ChildProcess(made, log, inherits=theirs, zygote=self._zygote), ours)

    def trainer_address(self) -> str | None:
        """`sync.host` is right."""
        return None

    def rank_address(self) -> str:
        """All ranks are here."""
        return "127.0.0.1"

    async def close(self) -> None:
        """Nothing was taken."""
