"""Workloads and a loop whose clock is simulated, for the tests of the planner."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

from miles_loop.plan.workload import Lengths, Pareto, RandomWorkload

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
