"""Plain values that the simulation is made of, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_contracts import InvalidFieldError
from miles_rollout.ledger import UnusedPolicy
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """How long the trainer's side of a step takes.

    Attributes:
        fixed_s: seconds of a step whatever the batch holds.
        per_token_s: seconds for one token of the batch, prompts included.
        prepare_s: seconds of a weight update while engines still sample.
        pause_s: seconds of a weight update while they do not.
        overhead_s: seconds of the driver after the update (records, checkpoints).
    """

    fixed_s: float
    per_token_s: float = 0.0
    prepare_s: float = 0.0
    pause_s: float = 0.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_token_s", "prepare_s", "pause_s", "overhead_s"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise InvalidFieldError(f"trainer.{name}", value, "use a finite value >= 0")

    def train_s(self, tokens: int) -> float:
        """Seconds of the optimiser step on a batch of `tokens`."""
        return self.fixed_s + self.per_token_s * tokens

    def step_s(self, tokens: float) -> float:
        """Seconds of a whole step whose batch is there when it is wanted."""
        return self.fixed_s + self.per_token_s * tokens + self.prepare_s + self.pause_s + self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Shape of the run.

    Attributes:
        batch_groups: groups of one batch.
        group_size: trajectories of one group.
        depth: batches that rollout may run ahead; 0 is synchronous.
        max_in_flight: trajectories in flight at most, None for no bound but the depth's.
        buffer_groups: finished groups that may wait; None for twice the batch.
        max_staleness: oldest usable group in updates, None for no limit.
        granularity: when a trajectory's place is free again.
        order: in which finished groups are trained.
        on_failure, on_stale: whether the prompt of an unused group is tried again.
        max_retries: tries of a prompt after its first.
        retract: contexts are computed again after an update; else sequences go on with the cache they have.
        engines: number of engines.
        steps: optimiser steps to simulate.
        warmup: steps at the start that no figure counts.
        prefix_cache: an answer extends what its engine has cached under the same weights.
        rollout_workers: processes that make trajectories; trajectories are dealt out among them in turn.
        handling_s: seconds of such a process for each turn, half of them before the engine has it; turns wait for each
            other there.
    """

    batch_groups: int
    group_size: int
    depth: int
    max_in_flight: int | None = None
    buffer_groups: int | None = None
    max_staleness: int | None = None
    granularity: Granularity = Granularity.SAMPLE
    order: TrainingOrder = TrainingOrder.ARRIVAL
    on_failure: UnusedPolicy = UnusedPolicy.RETRY
    on_stale: UnusedPolicy = UnusedPolicy.RETRY
    max_retries: int = 2
    retract: bool = False
    engines: int = 1
    steps: int = 60
    warmup: int = 10
    prefix_cache: bool = True
    rollout_workers: int = 1
    handling_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("engines", 1), ("rollout_workers", 1), ("steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise InvalidFieldError(f"pipeline.{name}", getattr(self, name), f"use a value >= {least}")
        if not 0.0 <= self.handling_s < math.inf:
            raise InvalidFieldError("pipeline.handling_s", self.handling_s, "use a finite value >= 0")
        if self.warmup >= self.steps:
            raise InvalidFieldError("pipeline.warmup", self.warmup, f"leave it below pipeline.steps ({self.steps})")
        if self.buffer_groups is not None and self.buffer_groups < self.batch_groups:
            raise InvalidFieldError(
                "pipeline.buffer_groups", self.buffer_groups, f"a batch has {self.batch_groups} groups"
            )

    @property
    def room(self) -> int:
        """Finished groups that may wait."""
        return self.buffer_groups or 2 * self.batch_groups
