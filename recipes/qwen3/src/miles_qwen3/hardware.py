"""Hardware targets of the Qwen3 family. The CPU runs everything; GPU targets say what they need.

Sizes are those the field runs: a batch of 32 prompts x 8 answers, answers of up to 8,192 tokens, learning rate 1e-6,
clip range 0.2 / 0.28. One line of `_GPU` is one target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_loop import HardwareTarget
from miles_rollout.sglang_launch import SglangOptions

_CPU_ENGINE = SglangOptions(
    device="cpu",
    attention_backend="torch_native",
    sampling_backend="pytorch",
    memory_fraction=0.1,
    max_total_tokens=20000,
    cuda_graph=False,
    overlap_schedule=False,
    sleep_on_idle=True,
)
"""SGLang without a GPU, for `--rollout.engine sglang`; the embedded engine is the default."""


def _section(options: SglangOptions) -> dict[str, Any]:
    return options.model_dump(mode="json", exclude_defaults=True)


CPU = HardwareTarget(
    name="cpu",
    summary="any machine, two cores are enough",
    overrides={"engine": {"sglang": _section(_CPU_ENGINE)}},
)

_NEEDS = "GPUs, on which this release was never run, and SGLang engines on those that do not train"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """One model on one kind of machine; `engine` is how one SGLang uses its GPUs."""

    name: str
    model: str
    gpus: str
    engine: SglangOptions
    tokens_per_micro_batch: int


_GPU = (
    _Gpu(
        name="h100-0.6b",
        model="Qwen/Qwen3-0.6B",
        gpus="2 x H100: 1 trains, 1 samples",
        engine=SglangOptions(memory_fraction=0.8, attention_backend="fa3"),
        tokens_per_micro_batch=32768,
    ),
    _Gpu(
        name="h100-4b",
        model="Qwen/Qwen3-4B",
        gpus="8 x H100: 4 train (data parallel), 4 sample",
        engine=SglangOptions(memory_fraction=0.8, attention_backend="fa3"),
        tokens_per_micro_batch=16384,
    ),
    _Gpu(
        name="h100-8b",
        model="Qwen/Qwen3-8B",
        gpus="8 x H100: 4 train (tensor parallel 2), 4 sample",
        engine=SglangOptions(memory_fraction=0.8, attention_backend="fa3"),
        tokens_per_micro_batch=16384,
    ),
    _Gpu(
        name="h100-32b",
        model="Qwen/Qwen3-32B",
        gpus="16 x H100: 8 train (tensor parallel 8), 2 engines of 4",
        engine=SglangOptions(tensor_parallel=4, memory_fraction=0.8, attention_backend="fa3"),
        tokens_per_micro_batch=16384,
    ),
    _Gpu(
        name="h100-30b-a3b",
        model="Qwen/Qwen3-30B-A3B",
        gpus="16 x H100: 8 train (expert parallel 8), 1 engine of 8",
        engine=SglangOptions(tensor_parallel=8, expert_parallel=8, memory_fraction=0.8, routed_experts=True),
        tokens_per_micro_batch=16384,
    ),
    _Gpu(
        name="a100-8b",
        model="Qwen/Qwen3-8B",
        gpus="8 x A100, BF16 only: 4 train (tensor parallel 2), 4 sample",
        engine=SglangOptions(memory_fraction=0.75, attention_backend="flashinfer"),
        tokens_per_micro_batch=8192,
    ),
    _Gpu(
        name="b200-30b-a3b",
        model="Qwen/Qwen3-30B-A3B",
        gpus="8 x B200: 4 train (expert parallel 4), 1 engine of 4",
        engine=SglangOptions(tensor_parallel=4, expert_parallel=4, memory_fraction=0.85, routed_experts=True),
        tokens_per_micro_batch=32768,
    ),
)


def _target(gpu: _Gpu) -> HardwareTarget:
    overrides: dict[str, Any] = {
        "model": gpu.model,
        "engine": {"kind": "sglang", "dtype": "bfloat16", "sglang": _section(gpu.engine)},
        "rollout": {"groups_per_step": 32, "group_size": 8, "sampling": {"max_new_tokens": 8192}},
        "trainer": {
            "optimizer": {"lr": 1e-6, "betas": (0.9, 0.98), "schedule": {"kind": "constant", "total_steps": None}},
            "objective": {"entropy_coefficient": 0.0},
            "batching": {"max_tokens": gpu.tokens_per_micro_batch},
        },
    }
    return HardwareTarget(name=gpu.name, summary=f"{gpu.model}, {gpu.gpus}", overrides=overrides, needs=_NEEDS)


TARGETS = (CPU, *(_target(gpu) for gpu in _GPU))
