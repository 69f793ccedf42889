"""The whole configuration of a run, and what it writes down."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from miles_loop.config.engine import EngineConfig
from miles_loop.config.evaluation import EvaluationConfig
from miles_loop.config.rollout import RolloutConfig
from miles_loop.config.runtime import RuntimeConfig, RuntimeKind
from miles_loop.config.section import NonNegative, Positive, Section
from miles_loop.config.sync import SyncConfig
from miles_loop.config.task import TaskConfig
from miles_rollout.router import RouterConfig
from miles_trainer.config import TrainerConfig


class CheckpointConfig(Section):
    """When a run is saved."""

    every: NonNegative = 0
    """Checkpoint after every n optimiser steps; 0: only at the end and on a graceful stop."""
    keep: Positive = 2
    """How many checkpoints stay on disk (the newest ones)."""
    at_end: bool = True
    """Checkpoint the finished run."""


class RecordConfig(Section):
    """What a run writes down besides metrics."""

    trajectories: NonNegative = 4
    """Groups written to the run folder per step (wire frames); 0 writes none."""
    trajectories_mib: Positive = 256
    """Stop writing trajectories after this many MiB."""
    plot: bool = True
    """Draw the reward plot at the end."""


class RunConfig(Section):
    """One run, complete: what `--dry-run` prints and the run folder stores as `config.toml`."""

    recipe: str = ""
    """Name of the recipe this run was made with."""
    hardware: str = "cpu"
    """Hardware target of the recipe."""
    model: str = ""
    """Name of a model of the recipe, or a folder with a Hugging Face model and tokenizer."""
    run_dir: Path | None = None
    """Run folder; default: `runs/<recipe>-<time>`."""
    steps: Positive = 100
    """Optimiser steps of the whole run."""
    seed: NonNegative = 0
    """Seed of everything random: weights of a fresh model, prompt order, sampling, dropout."""
    pipeline_depth: NonNegative = 1
    """Batches that rollout may run ahead of the trainer; 0 is synchronous."""
    task: TaskConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _answers_differ(self) -> RunConfig:
        rollout = self.rollout
        # An agent may choose its own sampling, and its tools may answer differently each time.
        if rollout.sampling.temperature == 0 and rollout.filter == "no_signal" and self.task.agent is None:
            raise ValueError(
                "rollout.sampling.temperature: greedy answers to one prompt are all equal, so rollout.filter = "
                "no_signal drops every group; use a value > 0, such as 1"
            )
        return self

    @property
    def rollout_workers(self) -> int:
        """Rollout worker processes, with their default resolved."""
        asked = self.runtime.rollout_workers
        return int(self.runtime.kind is RuntimeKind.RAY) if asked is None else asked

    @model_validator(mode="after")
    def _ranks_have_devices(self) -> RunConfig:
        ranks, device = self.runtime.trainer_ranks, self.trainer.device
        if ranks > 1 and self.runtime.kind is RuntimeKind.LOCAL and device.startswith("cuda:"):
            raise ValueError(
                f"trainer.device: {ranks} trainer ranks cannot share {device}; use cuda, of which each takes its own"
            )
        return self

    @property
    def max_staleness(self) -> int:
        """Staleness limit in optimiser updates, with its default resolved."""
        return self.pipeline_depth + 1 if self.rollout.max_staleness is None else self.rollout.max_staleness

    @property
    def buffer_groups(self) -> int:
        """Capacity of the buffer in groups, with its default resolved."""
        return self.rollout.buffer_groups or 2 * self.rollout.groups_per_step
