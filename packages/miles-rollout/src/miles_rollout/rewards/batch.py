"""Rewards that score many responses at once, fed by calls for one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles_contracts import InvalidFieldError, Task

BatchFunction = Callable[[Sequence[Task], Sequence[str]], Awaitable[Sequence[float]] | Sequence[float]]
"""Scores tasks and their responses, one number each, in order."""


class BatchReward:
    """A reward that gathers concurrent calls and scores them together.

    Args:
        function: scores a batch. When it raises, or returns another number of rewards, every response of the
            batch fails with that reason.
        max_batch: largest batch; a full one is scored at once.
        max_wait_s: how long the first response waits for others.
    """

    def __init__(self, function: BatchFunction, *, max_batch: int = 64, max_wait_s: float = 0.02) -> None:
        if max_batch < 1:
            raise InvalidFieldError("max_batch", max_batch, "use a value >= 1")
        if max_wait_s < 0:
            raise InvalidFieldError("max_wait_s", max_wait_s, "use a value >= 0")
        self._function = function
        self._max_batch = max_batch
        self._max_wait = max_wait_s
        self._waiting: list[tuple[Task, str, asyncio.Future[float]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, task: Task, response: str) -> float:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        self._waiting.append((task, response, future))
        if len(self._waiting) >= self._max_batch:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A caller that was cancelled while it waited is not worth scoring.
        batch = [w for w in self._waiting if not w[2].done()]
        self._waiting = []
        if batch:
            running = asyncio.ensure_future(self._score(batch))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _score(self, batch: list[tuple[Task, str, asyncio.Future[float]]]) -> None:
        try:
            result: Any = self._function([b[0] for b in batch], [b[1] for b in batch])
            rewards = list(await result if inspect.isawaitable(result) else result)
            if len(rewards) != len(batch):
                raise ValueError(f"the batch reward gave {len(rewards)} rewards for {len(batch)} responses")
        except Exception as error:  # noqa: BLE001 - carried to every caller of the batch
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, _, future), reward in zip(batch, rewards, strict=True):
            if not future.done():
                future.set_result(reward)
