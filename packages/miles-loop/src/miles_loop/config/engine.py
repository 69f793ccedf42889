"""Settings of the inference engines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from miles_loop.config.section import LAST_PORT, NonNegative, Port, Positive, Seconds, Section
from miles_rollout.engine_identity import EngineDtype, EngineKind
from miles_rollout.sglang_launch import SglangOptions


class RouterKind(StrEnum):
    """What places turns on engines."""

    OWN = "own"
    SGLANG = "sglang"


class EngineConfig(Section):
    """The inference engines."""

    kind: EngineKind = EngineKind.EMBEDDED
    """What is started as an engine: the `embedded` engine, or `sglang` (installed, or see `engine.python`)."""
    replicas: Positive = 1
    """Number of engine processes."""
    urls: tuple[str, ...] = ()
    """Use these running engines (SGLang's native API) and start none."""
    host: str = "127.0.0.1"
    """Address the engines listen on."""
    port: Port = 0
    """First port; replica i uses port + i. 0: free ports are chosen."""
    threads: Positive = 1
    """CPU threads of one engine process."""
    dtype: EngineDtype = "float32"
    """Data type of the weights in the engine; `auto` takes the one in the model's config."""
    max_batch: Annotated[int, Field(ge=1, le=65536)] = 256
    """Most sequences sampled at the same time by one engine."""
    max_context: Positive | None = None
    """Longest sequence, prompt included; default: the model's own limit."""
    extra_args: tuple[str, ...] = ()
    """More command-line arguments for the engine."""
    python: str | None = None
    """Interpreter of the environment that the engines run in (SGLang often has one of its own); default: this one."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables for the engines, for example `engine.environment.CUDA_VISIBLE_DEVICES`."""
    sglang: SglangOptions = SglangOptions()
    """How an SGLang engine uses its hardware."""
    start_timeout_s: Seconds = 300.0
    """Deadline for an engine to become healthy."""
    restarts: NonNegative = 3
    """How often a dead engine is started again before the run ends."""
    hang_s: Seconds = 120.0
    """An engine that answers no health check for this long is killed and started again."""
    router: RouterKind = RouterKind.OWN
    """What places turns on engines: Miles' `own` router, or a `sglang` router process in front of them."""

    @model_validator(mode="after")
    def _ports_exist(self) -> EngineConfig:
        if self.replicas > LAST_PORT:
            raise ValueError(f"replicas: a machine has ports for {LAST_PORT} at most")
        if self.port + self.replicas - 1 > LAST_PORT:
            raise ValueError(f"port: {self.replicas} engines from this one on need ports above {LAST_PORT}")
        return self
