"""What a simulated run was like, in the figures that real runs report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimiser step.

    Attributes:
        step_s, wait_s, train_s: seconds of the step, of waiting for its batch, of the optimiser step.
        tokens: tokens of the batch.
        avg_staleness, max_staleness: of the groups of the batch, in updates.
        queue_size: finished groups that were left in the buffer.
        in_flight: trajectories in flight when the step ended.
        generation_s: mean seconds from the start to the end of the batch's groups.
    """

    step_s: float
    wait_s: float
    train_s: float
    tokens: int
    avg_staleness: float
    max_staleness: float
    queue_size: float
    in_flight: int
    generation_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulated run after its warm-up.

    Attributes:
        records: the steps that count.
        wall_s: their seconds.
        engine_idle: share of the time in which an engine computes nothing: it has no request, or its weights change.
        prefix_hit_rate: cached prompt tokens over prompt tokens, warm-up included.
        trajectories_per_batch: of one step.
        groups: groups of the whole run by what became of them: `started` is the sum of all others.
        largest_buffer: most finished groups that waited at the same time.
    """

    records: tuple[StepRecord, ...]
    wall_s: float
    engine_idle: float
    prefix_hit_rate: float
    trajectories_per_batch: int
    groups: Mapping[str, int]
    largest_buffer: int

    def _mean(self, name: str) -> float:
        return math.fsum(getattr(r, name) for r in self.records) / len(self.records)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._mean("step_s")

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step."""
        return _median([r.step_s for r in self.records])

    @property
    def train_s(self) -> float:
        """Mean seconds of the optimiser step."""
        return self._mean("train_s")

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits for a batch."""
        return self._mean("wait_s") / self.step_s if self.step_s else 0.0

    @property
    def avg_staleness(self) -> float:
        """Mean staleness of what was trained."""
        return self._mean("avg_staleness")

    @property
    def max_staleness(self) -> float:
        """Largest staleness of what was trained."""
        return max(r.max_staleness for r in self.records)

    @property
    def queue_size(self) -> float:
        """Mean of the finished groups that wait after a batch is taken."""
        return self._mean("queue_size")

    @property
    def in_flight(self) -> float:
        """Mean of the trajectories in flight when a step ends."""
        return self._mean("in_flight")

    @property
    def generation_s(self) -> float:
        """Mean seconds that a group is generated for."""
        return self._mean("generation_s")

    @property
    def trajectories_per_s(self) -> float:
        """Trained trajectories in a second."""
        return self.trajectories_per_batch * len(self.records) / self.wall_s if self.wall_s else math.inf

    @property
    def dropped(self) -> int:
        """Groups that were finished and not used."""
        return sum(self.groups.get(name, 0) for name in ("failed", "filtered", "stale", "unknown_version"))

    def figures(self) -> dict[str, float]:
        """All of it as numbers."""
        return {
            "step_s": self.step_s,
            "median_step_s": self.median_step_s,
            "train_s": self.train_s,
            "trainer_idle": self.trainer_idle,
            "engine_idle": self.engine_idle,
            "avg_staleness": self.avg_staleness,
            "max_staleness": self.max_staleness,
            "queue_size": self.queue_size,
            "largest_buffer": float(self.largest_buffer),
            "in_flight": self.in_flight,
            "generation_s": self.generation_s,
            "trajectories_per_s": self.trajectories_per_s,
            "prefix_hit_rate": self.prefix_hit_rate,
            "dropped_groups": float(self.dropped),
        }


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
