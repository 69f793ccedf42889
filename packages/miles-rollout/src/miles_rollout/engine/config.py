"""What an engine process is started with."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from miles_rollout.engine_identity import EngineDtype


class EngineConfig(BaseModel):
    """Settings of one embedded engine.

    Attributes:
        model_path: Hugging Face folder with config, weights and (for text) tokenizer.json.
        threads: CPU threads of the model.
        dtype: `auto` takes the one in the model's config.
        context_length: most tokens of one sequence; default is the model's.
        max_total_tokens: KV slots; default is what `kv_memory_mb` holds, at most `max_running_requests` contexts.
        chunked_prefill_size: most tokens fed in one forward pass.
        weight_version: name of the weights in the folder; a decimal number is the number of optimiser updates.
        random_seed: root of the seeds of requests that bring none; default is different on every start.
        force_native_cache: run on the model's own cache even where slots would do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: Path
    host: str = "127.0.0.1"
    port: int = Field(default=30000, ge=0, le=65535)
    threads: int = Field(default=1, ge=1)
    device: str = "cpu"
    dtype: EngineDtype = "auto"
    context_length: int | None = Field(default=None, ge=2)
    max_running_requests: int = Field(default=256, ge=1)
    max_queued_requests: int = Field(default=65536, ge=1)
    max_total_tokens: int | None = Field(default=None, ge=2)
    kv_memory_mb: int = Field(default=2048, ge=1)
    chunked_prefill_size: int = Field(default=2048, ge=1)
    weight_version: str = "default"
    random_seed: int | None = Field(default=None, ge=0)
    force_native_cache: bool = False
    end_with_parent: bool = False
