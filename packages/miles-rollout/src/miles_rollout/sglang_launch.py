"""The command line of an SGLang server is a pure function of a hardware target's options.

Only options that a target really sets appear on the line, so SGLang's own defaults stay in force. The names
of the fields are ours; every flag is checked against the parser of a real SGLang in the integration tests.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from miles_contracts import InvalidFieldError

_Positive = Annotated[int, Field(ge=1)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DisaggregationMode(StrEnum):
    """Which half of the work a server does when prefill and decode are apart."""

    PREFILL = "prefill"
    DECODE = "decode"


class SpeculativeOptions(_Options):
    """Speculative decoding; the draft proposes, the policy verifies, the distribution stays the policy's."""

    algorithm: str = Field(description="for example EAGLE, EAGLE3, NEXTN or NGRAM")
    num_steps: _Positive | None = Field(default=None, description="draft steps per verification")
    eagle_topk: _Positive | None = Field(default=None, description="branches per draft step")
    num_draft_tokens: _Positive | None = Field(default=None, description="tokens verified at once")
    draft_model_path: str | None = Field(default=None, description="draft model; none for a model's own MTP layers")


class DisaggregationOptions(_Options):
    """Prefill and decode on different servers."""

    mode: DisaggregationMode
    transfer_backend: str = Field(default="mooncake", description="how KV travels: mooncake, nixl, mori ...")
    bootstrap_port: int | None = Field(default=None, ge=1, le=65535)
    ib_device: str | None = Field(default=None, description="InfiniBand devices, comma separated")


class SglangOptions(_Options):
    """How one SGLang engine uses its GPUs."""

    tensor_parallel: _Positive = 1
    data_parallel: _Positive = 1
    pipeline_parallel: _Positive = 1
    expert_parallel: _Positive = 1
    attention_data_parallel: _Positive = Field(default=1, description="data-parallel attention inside the tensor ranks")
    memory_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="share of GPU memory for weights and KV"
    )
    dtype: str | None = None
    quantization: str | None = Field(
        default=None, description="fp8, mxfp8, modelopt_fp4 ...; none for the checkpoint's own"
    )
    kv_cache_dtype: str | None = None
    attention_backend: str | None = Field(default=None, description="fa3, flashinfer, triton ...")
    moe_runner_backend: str | None = None
    moe_a2a_backend: str | None = None
    context_length: _Positive | None = None
    max_running_requests: _Positive | None = None
    chunked_prefill_size: _Positive | None = None
    speculative: SpeculativeOptions | None = None
    disaggregation: DisaggregationOptions | None = None
    routed_experts: bool = Field(default=False, description="record expert choices for routing replay")
    deterministic: bool = Field(
        default=False, description="batch-invariant kernels: the same ids whatever is in the batch"
    )
    memory_saver: bool = Field(default=False, description="let weights and KV leave the GPU while the trainer uses it")
    extra: tuple[str, ...] = Field(default=(), description="further flags, passed through as they are")

    @model_validator(mode="after")
    def _consistent(self) -> SglangOptions:
        ranks = self.tensor_parallel
        for name in ("expert_parallel", "attention_data_parallel"):
            if ranks % getattr(self, name):
                raise InvalidFieldError(name, getattr(self, name), f"it must divide tensor_parallel {ranks}")
        return self

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def _valued(options: SglangOptions) -> list[tuple[str, object]]:
    """(flag, value) in a fixed order; None and a parallel size of 1 are left to SGLang."""
    sizes = [
        ("--tp-size", options.tensor_parallel),
        ("--dp-size", options.data_parallel),
        ("--pp-size", options.pipeline_parallel),
        ("--ep-size", options.expert_parallel),
        ("--attn-dp-size", options.attention_data_parallel),
    ]
    pairs: list[tuple[str, object]] = [(flag, size) for flag, size in sizes if size > 1]
    pairs += [
        ("--mem-fraction-static", options.memory_fraction),
        ("--dtype", options.dtype),
        ("--quantization", options.quantization),
        ("--kv-cache-dtype", options.kv_cache_dtype),
        ("--attention-backend", options.attention_backend),
        ("--moe-runner-backend", options.moe_runner_backend),
        ("--moe-a2a-backend", options.moe_a2a_backend),
        ("--context-length", options.context_length),
        ("--max-running-requests", options.max_running_requests),
        ("--chunked-prefill-size", options.chunked_prefill_size),
    ]
    if (speculative := options.speculative) is not None:
        pairs += [
            ("--speculative-algorithm", speculative.algorithm),
            ("--speculative-draft-model-path", speculative.draft_model_path),
            ("--speculative-num-steps", speculative.num_steps),
            ("--speculative-eagle-topk", speculative.eagle_topk),
            ("--speculative-num-draft-tokens", speculative.num_draft_tokens),
        ]
    if (apart := options.disaggregation) is not None:
        pairs += [
            ("--disaggregation-mode", apart.mode.value),
            ("--disaggregation-transfer-backend", apart.transfer_backend),
            ("--disaggregation-bootstrap-port", apart.bootstrap_port),
            ("--disaggregation-ib-device", apart.ib_device),
        ]
    return [(flag, value) for flag, value in pairs if value is not None]


def option_arguments(options: SglangOptions) -> list[str]:
    """The arguments that the options themselves stand for, without model, address and node."""
    arguments: list[str] = []
    for flag, value in _valued(options):
        arguments += [flag, str(value)]
    switches = (
        ("--enable-return-routed-experts", options.routed_experts),
        ("--enable-deterministic-inference", options.deterministic),
        ("--enable-memory-saver", options.memory_saver),
    )
    return arguments + [flag for flag, wanted in switches if wanted]


def sglang_arguments(
    options: SglangOptions,
    *,
    model_path: str,
    host: str = "127.0.0.1",
    port: int,
    seed: int | None = None,
    weight_version: int | None = None,
    num_nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
) -> list[str]:
    """Arguments after `python -m sglang.launch_server` for one node of one engine.

    Args:
        options: the hardware target's choice.
        model_path: Hugging Face folder.
        host: address to listen on.
        port: port to listen on.
        seed: SGLang's `--random-seed`.
        weight_version: number of optimiser updates in the weights at `model_path`, 0 for a fresh policy.
        num_nodes: machines that share the engine.
        node_rank: which of them this is.
        rendezvous: `host:port` of node 0, required with several nodes.

    Raises:
        InvalidFieldError: several nodes without a rendezvous, or a rank outside them.
    """
    arguments = ["--model-path", model_path, "--host", host, "--port", str(port), *option_arguments(options)]
    if seed is not None:
        arguments += ["--random-seed", str(seed)]
    if weight_version is not None:
        arguments += ["--weight-version", str(weight_version)]
    if num_nodes > 1:
        if rendezvous is None:
            raise InvalidFieldError("rendezvous", rendezvous, f"{num_nodes} nodes need host:port of node 0")
        if not 0 <= node_rank < num_nodes:
            raise InvalidFieldError("node_rank", node_rank, f"it must be in [0, {num_nodes})")
        arguments += ["--nnodes", str(num_nodes), "--node-rank", str(node_rank), "--dist-init-addr", rendezvous]
    return [*arguments, "--skip-server-warmup", *options.extra]
