"""How far a run is, as plain data: the driver updates it, a display shows it, `status.json` stores it.

Counters are totals since the start of the run and survive a resume; a resumed run adds to them.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RunStatus(StrEnum):
    """Where a run is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    DIED = "died"
    """The driver's process is gone without having said why (only a reader finds this out)."""


FAILURE = "failure/"
"""Counters of failed groups begin so; their reason follows."""
_COUNTERS = (
    "tokens_sampled",
    "tokens_trained",
    "token_mismatches",
    "routes_audited",
    "route_mismatches",
    "groups_trained",
    "engine_restarts",
    "rollout_worker_restarts",
    "prompts_given_up",
    "prompts_dropped",
    "evaluations_skipped",
    "trainer_restarts",
    "wall_s",
)


@dataclass(slots=True)
class Progress:
    """State of a run for people.

    Attributes:
        steps: optimiser steps to do.
        step: steps done.
        status: where the run is.
        phase: what the driver waits for now, in words.
        counters: totals by name (see `_COUNTERS`).
        evaluations: (step, mean reward over the held-out tasks), in order.
        rewards: (step, mean training reward), in order.
        latest: the last record of `metrics.jsonl`.
        time_to_first_step_s: from process start to the end of the first optimiser step of the run.
        reason: why the run ended early, "" otherwise.
        message: the same for people.
    """

    steps: int
    step: int = 0
    status: RunStatus = RunStatus.STARTING
    phase: str = "starting"
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    latest: dict[str, Any] = field(default_factory=dict)
    time_to_first_step_s: float | None = None
    reason: str = ""
    message: str = ""
    _resumed_step: int = 0
    _resumed_at: float = field(default_factory=time.monotonic)

    def begin(self, step: int) -> None:
        """The first step is about to start; time left is estimated from here on."""
        self.step = self._resumed_step = step
        self._resumed_at = time.monotonic()
        self.status = RunStatus.RUNNING

    def note(self, record: Mapping[str, Any]) -> None:
        """Take in a record of `metrics.jsonl`; one of an earlier step is an evaluation that took its time."""
        if record["step"] >= self.latest.get("step", 0):
            same = record["step"] == self.latest.get("step")
            self.latest = {**self.latest, **record} if same else dict(record)
        if "rollout/reward" in record:
            self.rewards.append((record["step"], record["rollout/reward"]))
        scores = [v for k, v in record.items() if k.startswith("eval/") and k.endswith("/reward")]
        if scores:
            insort(self.evaluations, (record["step"], sum(scores) / len(scores)))

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last step, None before the first."""
        done = self.step - self._resumed_step
        if done < 1:
            return None
        return (time.monotonic() - self._resumed_at) / done * (self.steps - self.step)

    def to_status(self) -> dict[str, Any]:
        """What `status.json` holds."""
        return {
            "status": str(self.status),
            "step": self.step,
            "steps": self.steps,
            "phase": self.phase,
            "reason": self.reason,
            "message": self.message,
            "time_to_first_step_s": self.time_to_first_step_s,
            "counters": dict(self.counters),
            "updated": time.time(),
        }
