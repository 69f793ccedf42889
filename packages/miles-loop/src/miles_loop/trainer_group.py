"""The trainer's processes as the driver sees them: it talks to rank 0, and the end of any of them is the end of all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from miles_loop import trainer_link as link
from miles_loop.errors import ProcessDiedError, RunError, TrainerFailedError
from miles_loop.hosts import Linked
from miles_loop.trainer_client import LOST_GROUP, TrainerClient

TRAINER = "trainer"
"""Name of the trainer process, of rank 0 where there are several."""


def rank_name(rank: int) -> str:
    """Name of the process of a rank."""
    return TRAINER if rank == 0 else f"{TRAINER}-{rank}"


def costs_the_trainer(error: RunError) -> bool:
    """Whether a run that ended so can go on from a checkpoint with a trainer that is started anew."""
    if isinstance(error, ProcessDiedError):
        return error.name == TRAINER or error.name.startswith(f"{TRAINER}-")
    return isinstance(error, TrainerFailedError) and error.reason in LOST_GROUP


class TrainerGroup:
    """Processes of 1 to N ranks, and the connection to the first.

    Args:
        made: one a rank, not started.
        step_timeout_s: of each request to rank 0.
    """

    def __init__(self, made: Sequence[Linked], step_timeout_s: float) -> None:
        self._processes = [one.process for one in made]
        self.client = TrainerClient(made[0].connection, step_timeout_s)
        self._others = [TrainerClient(one.connection, step_timeout_s) for one in made[1:]]

    @property
    def logs(self) -> str:
        """Where the processes write to, for people."""
        return ", ".join(str(process.log) for process in self._processes)

    async def start(self) -> None:
        """Start the processes; returns while they load."""
        await asyncio.gather(*(process.start() for process in self._processes))

    async def form(self, host: str, rank_timeout_s: float, deadline_s: float) -> None:
        """Have the others join rank 0, where there are others.

        Args:
            host: address of rank 0's machine as they reach it.
            rank_timeout_s: how long ranks wait for each other.
            deadline_s: for the processes to be there and to join.

        Raises:
            DeadlineExceededError, TrainerFailedError, RunError: a rank that did not.
        """
        size = len(self._processes)
        if size == 1:
            return
        opened = await self.client.open_group(size, host, rank_timeout_s, deadline_s)
        requests = [
            link.JoinGroup(
                rank=rank,
                size=size,
                host=host,
                meeting_port=opened.meeting_port,
                address=address,
                secret=secret,
                timeout_s=rank_timeout_s,
            )
            for rank, (address, secret) in enumerate(zip(opened.addresses, opened.secrets, strict=True), start=1)
        ]
        joining = zip(self._others, requests, strict=True)
        await asyncio.gather(*(client.join_group(request, deadline_s) for client, request in joining))

    async def died(self) -> ProcessDiedError:
        """Wait until one of the processes ends by itself."""
        waiting = [asyncio.ensure_future(process.died()) for process in self._processes]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in waiting if task.done())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def stop(self, timeout_s: float) -> None:
        """End all of them."""
        for client in (self.client, *self._others):
            with contextlib.suppress(RunError):
                await client.stop()
        await asyncio.gather(*(process.stop(timeout_s) for process in self._processes))
