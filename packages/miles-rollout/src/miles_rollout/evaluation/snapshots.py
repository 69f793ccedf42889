"""Evaluation beside training: an exported snapshot is measured while the run goes on, and measured exactly.

submit: [wait or skip when too many are outstanding] -> export (the only part that holds training up)
        -> queued -> evaluator(version, folder) -> finished point
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path

from miles_contracts import Evaluator, InvalidFieldError
from miles_rollout.evaluation.points import EvalPoint, EvaluationSkippedError


class Overflow(StrEnum):
    """What a new evaluation does when too many are outstanding."""

    BACKPRESSURE = "backpressure"
    """It waits for the oldest, and training with it."""
    SKIP = "skip"
    """It is left out, as a skipped point."""


class SnapshotEvaluation:
    """Runs evaluations one after the other in the background.

    Args:
        evaluator: measures a version from its folder; what it raises makes a skipped point.
        export: writes the current weights as a Hugging Face folder at the given path.
        directory: where snapshots are written; each is `version-<n>` there.
        max_outstanding: evaluations queued or running.
        overflow: policy when that is reached.
        keep: newest measured snapshots that stay on disk.
        timeout_s: seconds one evaluation may take.
        clock: seconds, for durations.
    """

    def __init__(
        self,
        *,
        evaluator: Evaluator,
        export: Callable[[Path], Awaitable[None]],
        directory: Path,
        max_outstanding: int = 2,
        overflow: Overflow = Overflow.BACKPRESSURE,
        keep: int = 0,
        timeout_s: float | None = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_outstanding < 1:
            raise InvalidFieldError("max_outstanding", max_outstanding, "use a value >= 1")
        if keep < 0:
            raise InvalidFieldError("keep", keep, "use a value >= 0")
        self._evaluator = evaluator
        self._export = export
        self._directory = directory
        self._max = max_outstanding
        self._overflow = Overflow(overflow)
        self._keep = keep
        self._timeout = timeout_s
        self._clock = clock
        self._running: deque[asyncio.Task[None]] = deque()
        self._unmeasured: set[Path] = set()
        self._finished: list[EvalPoint] = []
        self._measured: deque[Path] = deque()
        self._turn = asyncio.Lock()

    @property
    def outstanding(self) -> int:
        """Evaluations queued or running."""
        return sum(not task.done() for task in self._running)

    async def submit(self, version: int, *, must: bool = False) -> None:
        """Export the current weights, which are `version`, and queue their evaluation.

        With `must` it waits for room whatever the policy is: nothing comes after the last weights of a run.
        """
        while self.outstanding >= self._max:
            if self._overflow is Overflow.SKIP and not must:
                self._finished.append(EvalPoint.skip(version, "busy", f"{self.outstanding} are outstanding"))
                return
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            self._reap()
        self._reap()
        started = self._clock()
        folder = self._directory / f"version-{version:08d}"
        try:
            await self._write(folder)
        except Exception as error:  # noqa: BLE001 - a failed export costs a point, never the run
            self._remove(folder)
            self._finished.append(EvalPoint.skip(version, "export_failed", f"{type(error).__name__}: {error}"))
            return
        exported_s = self._clock() - started
        self._unmeasured.add(folder)
        self._running.append(asyncio.create_task(self._measure(version, folder, exported_s), name=f"eval-{version}"))

    def take_finished(self, *, current_version: int) -> list[EvalPoint]:
        """Points that are done since the last call, with their lag in optimiser updates."""
        self._reap()
        points, self._finished = self._finished, []
        return [
            p if p.skipped is not None else p.with_metrics(lag_steps=float(current_version - p.version)) for p in points
        ]

    async def drain(self) -> None:
        """Wait for everything outstanding."""
        await asyncio.gather(*self._running)
        self._reap()

    async def close(self) -> None:
        """Cancel what is outstanding and remove its snapshots."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        for folder in self._unmeasured:
            self._remove(folder)
        self._unmeasured.clear()

    async def _write(self, folder: Path) -> None:
        # The name appears only when the snapshot is whole.
        partial = folder.with_name(folder.name + ".partial")
        self._remove(partial)
        self._remove(folder)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._export(partial)
            partial.rename(folder)
        finally:
            self._remove(partial)

    async def _measure(self, version: int, folder: Path, exported_s: float) -> None:
        started = self._clock()
        try:
            async with self._turn, asyncio.timeout(self._timeout):
                started = self._clock()
                metrics = dict(await self._evaluator(version, folder))
            point = EvalPoint(version=version, metrics=metrics)
        except EvaluationSkippedError as error:
            point = EvalPoint.skip(version, error.kind, error.reason)
        except TimeoutError:
            point = EvalPoint.skip(version, "timeout", f"took longer than {self._timeout} s")
        except Exception as error:  # noqa: BLE001 - a crash of foreign code is a skipped point
            point = EvalPoint.skip(version, "crashed", f"{type(error).__name__}: {error}")
        self._finished.append(
            point.with_metrics(
                version=float(version),
                export_time_seconds=exported_s,
                duration_seconds=self._clock() - started,
            )
        )
        self._unmeasured.discard(folder)
        self._measured.append(folder)
        while len(self._measured) > self._keep:
            self._remove(self._measured.popleft())

    def _reap(self) -> None:
        while self._running and self._running[0].done():
            self._running.popleft().result()

    @staticmethod
    def _remove(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
