"""The command line of an SGLang server is a pure function of a hardware target's options.

Only options that a target really sets appear on the line, so SGLang's own defaults stay in force. The names
of the fields are ours; every flag is checked against the parser of a real SGLang in the integration tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from miles_contracts import InvalidFieldError

_Positive = Annotated[int, Field(ge=1)]


SERVER_MODULE = "sglang.launch_server"
"""What `python -m` runs."""


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DisaggregationMode(StrEnum):
    """Which half of the work a server does when prefill and decode are apart."""

    PREFILL = "prefill"
    DECODE = "decode"


class SpeculativeOptions(_Options):
    """Speculative decoding; the draft proposes, the policy verifies and keeps its distribution."""

    algorithm: str = Field(description="EAGLE, EAGLE3, NEXTN, NGRAM ...; needed with the others")
    num_steps: _Positive | None = Field(default=None, description="draft steps per verification")
    eagle_topk: _Positive | None = Field(default=None, description="branches per draft step")
    num_draft_tokens: _Positive | None = Field(default=None, description="tokens verified at once")
    draft_model_path: str | None = Field(default=None, description="draft model; none for a model's own MTP layers")


class DisaggregationOptions(_Options):
    """Prefill and decode on different servers."""

    mode: DisaggregationMode = Field(description="the half of the work that this server does; needed with the others")
    transfer_backend: str = Field(default="mooncake", description="how KV travels: mooncake, nixl, mori ...")
    bootstrap_port: int | None = Field(default=None, ge=1, le=65535, description="where prefill and decode meet")
    ib_device: str | None = Field(default=None, description="InfiniBand devices, comma separated")


class SglangOptions(_Options):
    """How one SGLang engine uses its hardware."""

    tensor_parallel: _Positive = Field(default=1, description="GPUs that share every layer")
    data_parallel: _Positive = Field(default=1, description="copies of the model behind one address")
    pipeline_parallel: _Positive = Field(default=1, description="GPUs that share the model layer by layer")
    expert_parallel: _Positive = Field(default=1, description="groups that the experts are spread over")
    attention_data_parallel: _Positive = Field(default=1, description="data-parallel attention inside the tensor ranks")
    memory_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="share of GPU memory for weights and KV"
    )
    quantization: str | None = Field(
        default=None, description="fp8, mxfp8, modelopt_fp4 ...; none for the checkpoint's own"
    )
    kv_cache_dtype: str | None = Field(default=None, description="fp8_e4m3, bfloat16 ...; none for the model's own")
    device: str | None = Field(default=None, description="cpu, cuda, xpu ...; none for what SGLang finds")
    attention_backend: str | None = Field(default=None, description="fa3, flashinfer, triton ...")
    sampling_backend: str | None = Field(default=None, description="flashinfer, pytorch ...")
    moe_runner_backend: str | None = Field(default=None, description="deep_gemm, triton, flashinfer_trtllm ...")
    moe_a2a_backend: str | None = Field(default=None, description="deepep, mooncake, nixl ...")
    chunked_prefill_size: _Positive | None = Field(default=None, description="prompt tokens computed at once")
    max_total_tokens: _Positive | None = Field(default=None, description="tokens in the KV pool")
    cuda_graph: bool = Field(default=True, description="replay recorded GPU work")
    overlap_schedule: bool = Field(default=True, description="plan the next step while this one is computed")
    sleep_on_idle: bool = Field(default=False, description="leave the CPU alone while there is nothing to do")
    speculative: SpeculativeOptions | None = None
    disaggregation: DisaggregationOptions | None = None
    routed_experts: bool = Field(default=False, description="record expert choices for routing replay")
    deterministic: bool = Field(
        default=False, description="batch-invariant kernels: the same ids whatever is in the batch"
    )
    memory_saver: bool = Field(default=False, description="let weights and KV leave the GPU while the trainer uses it")

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
        ("--quantization", options.quantization),
        ("--kv-cache-dtype", options.kv_cache_dtype),
        ("--device", options.device),
        ("--attention-backend", options.attention_backend),
        ("--sampling-backend", options.sampling_backend),
        ("--moe-runner-backend", options.moe_runner_backend),
        ("--moe-a2a-backend", options.moe_a2a_backend),
        ("--chunked-prefill-size", options.chunked_prefill_size),
        ("--max-total-tokens", options.max_total_tokens),
    ]
    if not options.cuda_graph:
        pairs += [("--cuda-graph-backend-decode", "disabled"), ("--cuda-graph-backend-prefill", "disabled")]
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
        ("--disable-overlap-schedule", not options.overlap_schedule),
        ("--sleep-on-idle", options.sleep_on_idle),
    )
    return arguments + [flag for flag, wanted in switches if wanted]


def sglang_arguments(
    options: SglangOptions,
    *,
    model_path: str,
    host: str = "127.0.0.1",
    port: int,
    dtype: str | None = None,
    context_length: int | None = None,
    max_running_requests: int | None = None,
    seed: int | None = None,
    weight_version: int | None = None,
    num_nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """Arguments after `python -m sglang.launch_server` for one node of one engine.

    Args:
        options: the hardware target's choice.
        model_path: Hugging Face folder.
        host: address to listen on.
        port: port to listen on.
        dtype: of weights and activations.
        context_length: longest sequence, None for the model's own.
        max_running_requests: most sequences sampled at the same time.
        seed: SGLang's `--random-seed`.
        weight_version: number of optimiser updates in the weights at `model_path`, 0 for a fresh policy.
        num_nodes: machines that share the engine.
        node_rank: which of them this is.
        rendezvous: `host:port` of node 0, required with several nodes.
        extra: further flags, passed on as they are.

    Raises:
        InvalidFieldError: several nodes without a rendezvous, or a rank outside them.
    """
    arguments = ["--model-path", model_path, "--host", host, "--port", str(port), *option_arguments(options)]
    common = (
        ("--dtype", dtype),
        ("--context-length", context_length),
        ("--max-running-requests", max_running_requests),
    )
    for flag, value in common:
        if value is not None:
            arguments += [flag, str(value)]
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
    return [*arguments, "--skip-server-warmup", *extra]


def sglang_environment(options: SglangOptions) -> dict[str, str]:
    """Environment variables that go with the options."""
    return {"SGLANG_USE_CPU_ENGINE": "1"} if options.device == "cpu" else {}
