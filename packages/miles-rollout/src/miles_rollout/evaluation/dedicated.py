"""Dedicated engines load a snapshot and are believed only when all of them report its version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_contracts import Engine, EngineError, InvalidFieldError
from miles_rollout.evaluation.heldout import HeldOut, evaluate
from miles_rollout.evaluation.points import EvaluationSkippedError
from miles_rollout.router import Router


class DedicatedEvaluator:
    """An Evaluator over engines of its own.

    Args:
        engines: engines that serve nobody else.
        router: over exactly these engines; `tasks` generate through it.
        tasks: what to measure.
        load_s: seconds for all engines to load the snapshot.
        concurrency: bound of trajectories in flight.
        episode_timeout_s: seconds for one answer.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        router: Router,
        tasks: Sequence[HeldOut],
        load_s: float = 600.0,
        concurrency: int = 256,
        episode_timeout_s: float | None = None,
    ) -> None:
        if not engines:
            raise InvalidFieldError("engines", [], "a dedicated evaluation needs at least one engine")
        self._engines = tuple(engines)
        self._router = router
        self._tasks = tuple(tasks)
        self._load_s = load_s
        self._concurrency = concurrency
        self._timeout = episode_timeout_s

    async def __call__(self, version: int, checkpoint: Path | None) -> Mapping[str, float]:
        """Load, check, measure, and check again.

        Raises:
            EvaluationSkippedError: an engine cannot load it (`unhealthy`), or does not serve exactly `version`
                before or after (`pin_violation`).
        """
        if checkpoint is None:
            raise InvalidFieldError("checkpoint", None, "dedicated engines load a snapshot; give its folder")
        try:
            async with asyncio.timeout(self._load_s):
                await asyncio.gather(*(e.load_from_disk(checkpoint, version) for e in self._engines))
        except (EngineError, TimeoutError) as error:
            raise EvaluationSkippedError("unhealthy", f"loading version {version}: {error}") from error
        await self._require(version)
        self._router.set_version(version)
        await self._router.check_health()
        metrics = await evaluate(self._tasks, concurrency=self._concurrency, episode_timeout_s=self._timeout)
        if not any(name.endswith("/reward") for name in metrics):
            raise EvaluationSkippedError("failed", "not one answer could be scored")
        await self._require(version)
        for name, value in metrics.items():
            if name.endswith("/weight_version/mean") and value != version:
                raise EvaluationSkippedError("pin_violation", f"{name} is {value}, the snapshot is {version}")
        return metrics

    async def _require(self, version: int) -> None:
        try:
            served = await asyncio.gather(*(e.weight_version() for e in self._engines))
        except EngineError as error:
            raise EvaluationSkippedError("unhealthy", str(error)) from error
        for engine, found in zip(self._engines, served, strict=True):
            if found != version:
                raise EvaluationSkippedError("pin_violation", f"{engine.url} serves {found}, not {version}")
