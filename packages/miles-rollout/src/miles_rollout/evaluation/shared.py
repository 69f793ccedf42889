"""Evaluation on the engines that also make training data: new training work stops, what is in flight is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from miles_contracts import DeadlineExceededError
from miles_rollout.evaluation.heldout import HeldOut, evaluate
from miles_rollout.evaluation.points import EvalPoint
from miles_rollout.worker import RolloutWorker

_WHY = "evaluation"


class SharedEvaluation:
    """Measures the version that the shared engines serve.

    Args:
        worker: paused for new groups while an evaluation runs, None when there is none yet (before training).
        tasks: what to measure.
        concurrency: bound of trajectories in flight.
        episode_timeout_s: seconds for one answer.
        drain_s: seconds to wait for training work in flight before the measurement starts.
        clock: seconds, for the duration.
    """

    def __init__(
        self,
        *,
        worker: RolloutWorker | None,
        tasks: Sequence[HeldOut],
        concurrency: int = 256,
        episode_timeout_s: float | None = None,
        drain_s: float | None = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._tasks = tuple(tasks)
        self._concurrency = concurrency
        self._timeout = episode_timeout_s
        self._drain = drain_s
        self._clock = clock

    async def run(self, version: int) -> EvalPoint:
        """Evaluate; `version` must be what the engines serve, and may not change meanwhile.

        What goes wrong makes a skipped point. New training work starts again in every case.
        """
        started = self._clock()
        if self._worker is not None:
            self._worker.pause_new(_WHY)
        try:
            if self._worker is not None:
                await self._worker.quiesce(deadline_s=self._drain)
            metrics = await evaluate(self._tasks, concurrency=self._concurrency, episode_timeout_s=self._timeout)
        except DeadlineExceededError as error:
            return EvalPoint.skip(version, "busy", str(error))
        except Exception as error:  # noqa: BLE001 - an evaluation that crashes costs a point, never the run
            return EvalPoint.skip(version, "crashed", f"{type(error).__name__}: {error}")
        finally:
            if self._worker is not None:
                self._worker.resume_new(_WHY)
        if not any(name.endswith("/reward") for name in metrics):
            return EvalPoint.skip(version, "failed", "not one answer could be scored")
        point = EvalPoint(version=version, metrics=metrics)
        return point.with_metrics(version=version, lag_steps=0.0, duration_seconds=self._clock() - started)
