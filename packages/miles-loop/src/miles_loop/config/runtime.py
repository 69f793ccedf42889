"""Settings of the processes of a run, and of the cluster that they are on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from miles_loop.config.section import NonNegative, Positive, Seconds, Section


class RuntimeKind(StrEnum):
    """Where the processes of a run are."""

    LOCAL = "local"
    RAY = "ray"


class RayPlacement(StrEnum):
    """How trainer and engines are spread over a cluster's nodes."""

    PACK = "pack"
    SPREAD = "spread"
    STRICT_PACK = "strict_pack"
    STRICT_SPREAD = "strict_spread"


class RayConfig(Section):
    """The Ray cluster, and what each actor takes of it. Only used by `runtime.kind = "ray"`."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    address: str | None = None
    """Cluster to join: `host:port`, or `auto` for the one that this machine is part of. Default: `RAY_ADDRESS` (which
    `ray job submit` sets), else a cluster of this machine alone, which ends with the run."""
    placement: RayPlacement = RayPlacement.PACK
    """`pack` (few nodes, when they have room), `spread` (many), `strict_pack` (one node or none), `strict_spread` (a
    node for each)."""
    trainer_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each trainer rank's actor; default: `runtime.trainer_threads`."""
    trainer_gpus: NonNegative | None = None
    """GPUs of each trainer rank's actor; default: 1 when `trainer.device` is a GPU, or may be one and engines have
    GPUs."""
    trainer_resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of each trainer rank's actor, for example `--runtime.ray.trainer_resources.big_memory 1`."""
    engine_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each engine's actor; default: `engine.threads`."""
    engine_gpus: NonNegative | None = None
    """GPUs of each engine's actor; default: as many as SGLang's parallelism spans, none for the embedded engine."""
    engine_resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of each engine's actor."""
    rollout_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each rollout worker's actor; default: 1."""
    rollout_resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of each rollout worker's actor."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the processes on the nodes, for example `--runtime.ray.env.NCCL_DEBUG INFO`."""
    placement_timeout_s: Seconds = 120.0
    """How long to wait until the cluster has room, at start and for an engine whose node was lost."""


class RuntimeConfig(Section):
    """The processes of a run."""

    kind: RuntimeKind = RuntimeKind.LOCAL
    """`local` (child processes on this machine) or `ray` (actors on the nodes of a Ray cluster)."""
    ray: RayConfig = RayConfig()
    trainer_ranks: Positive = 1
    """Processes that train together: each holds the whole model and trains its share of every batch (data parallel)."""
    trainer_rank_timeout_s: Seconds = 600.0
    """How long trainer ranks wait for one of them before all are started again from the newest checkpoint."""
    trainer_threads: Positive = 1
    """CPU threads of each trainer process."""
    trainer_restarts: NonNegative = 1
    """How often the run goes back to its newest checkpoint by itself when a trainer process dies or hangs."""
    rollout_workers: NonNegative | None = None
    """Processes that make answers (renderer, session server, agents, rewards and router); 0 makes them in the driver's
    own process. Default: 0 on this machine, 1 on a Ray cluster."""
    rollout_restarts: NonNegative = 3
    """How often each rollout worker that died is started again."""
    rollout_hang_s: Seconds = 120.0
    """A rollout worker that says nothing for this long is killed and started again."""
    share_imports: bool = True
    """Fork engines and trainer from one process that has imported what they need, where the machine allows it (Linux,
    no accelerator): they start sooner and share that memory. Only processes of one thread are forked."""
    step_timeout_s: Seconds = 3600.0
    """Deadline for one optimiser step, and for one batch of groups."""
    stop_timeout_s: Seconds = 10.0
    """Grace period for children to end before they are killed."""
