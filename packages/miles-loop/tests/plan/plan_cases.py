"""Workloads and a loop whose clock is simulated, for the tests of the planner."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from miles_loop.plan.engine import EngineRates
from miles_loop.plan.workload import Lengths, Pareto, RandomWorkload
from miles_rollout.engine.scheduler import Limits, Scheduler
from miles_rollout.engine.sequence import Sampling, Sequence

T = TypeVar("T")


def workload(
    *,
    delay: Pareto | None = None,
    sampled: float = 16,
    spread: float = 0.0,
    turns: float = 1,
    prompt: float = 10,
    failure_rate: float = 0.0,
    filter_rate: float = 0.0,
    seed: int = 0,
) -> RandomWorkload:
    """Single-turn episodes of a fixed length with a heavy-tailed environment, unless told otherwise."""
    return RandomWorkload(
        turns=Lengths(turns, spread if turns > 1 else 0.0),
        prompt=Lengths(prompt),
        observation=Lengths(prompt),
        sampled=Lengths(sampled, spread),
        delay=Pareto(0.25, 1.5, 20.0) if delay is None else delay,
        failure_rate=failure_rate,
        filter_rate=filter_rate,
        seed=seed,
    )


class RoundsEngine:
    """The embedded engine's own scheduler, whose rounds take what `rates` say on the clock of the loop."""

    def __init__(self, rates: EngineRates) -> None:
        self._rates = rates
        self._scheduler = Scheduler(Limits(kv_tokens=10**5, context_length=10**4, max_running=rates.max_running))
        self._left: dict[str, asyncio.Future[None]] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._count = 0
        self.busy_s = 0.0

    async def answer(self, new_tokens: int) -> None:
        """Return when so many tokens are sampled."""
        tokens = np.zeros(1 + new_tokens, np.int32)
        tokens[0] = self._count = self._count + 1  # nobody shares anything
        sampling = Sampling(max_new_tokens=new_tokens, seed=0)
        sequence = Sequence(id=str(self._count), tokens=tokens, prompt_length=1, sampling=sampling)
        done = self._left[sequence.id] = asyncio.get_running_loop().create_future()
        self._scheduler.add(sequence)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run())
        await done

    async def _run(self) -> None:
        while self._left:
            chunks = self._scheduler.next_step()
            self._scheduler.computed(chunks)
            seconds = self._rates.step_s(len(chunks), 0.0)
            await asyncio.sleep(seconds)
            self.busy_s += seconds
            for sequence in [chunk.sequence for chunk in chunks]:
                sequence.append(0, 0.0, "0")
                if sequence.finish is not None:
                    self._scheduler.finish(sequence)
                    self._left.pop(sequence.id).set_result(None)


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """Time stands still while something is ready, and jumps to the next timer when nothing is."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__()

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual

    def _run_once(self) -> None:
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self._virtual = max(self._virtual, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run_in_simulated_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a loop that never waits."""
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(main)
