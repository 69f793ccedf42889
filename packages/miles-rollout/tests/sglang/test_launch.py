from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from miles_contracts import InvalidFieldError
from miles_rollout.sglang_launch import (
    DisaggregationMode,
    DisaggregationOptions,
    SglangOptions,
    SpeculativeOptions,
    sglang_arguments,
    sglang_environment,
)

HEAD = "--model-path M --host 127.0.0.1 --port 30000"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ""),
        (
            {"tensor_parallel": 2, "memory_fraction": 0.7, "attention_backend": "fa3"},
            "--tp-size 2 --mem-fraction-static 0.7 --attention-backend fa3",
        ),
        (
            {"tensor_parallel": 8, "expert_parallel": 8, "attention_data_parallel": 8, "moe_a2a_backend": "deepep"},
            "--tp-size 8 --ep-size 8 --attn-dp-size 8 --moe-a2a-backend deepep",
        ),
        (
            {"speculative": SpeculativeOptions(algorithm="EAGLE", num_steps=3, eagle_topk=1, num_draft_tokens=4)},
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
        ),
        (
            {"disaggregation": DisaggregationOptions(mode=DisaggregationMode.PREFILL, bootstrap_port=8998)},
            "--disaggregation-mode prefill --disaggregation-transfer-backend mooncake "
            "--disaggregation-bootstrap-port 8998",
        ),
        (
            {
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "max_total_tokens": 20000,
                "cuda_graph": False,
                "overlap_schedule": False,
                "sleep_on_idle": True,
            },
            "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 20000 "
            "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --disable-overlap-schedule "
            "--sleep-on-idle",
        ),
        (
            {"routed_experts": True, "deterministic": True, "memory_saver": True, "quantization": "fp8"},
            "--quantization fp8 --enable-return-routed-experts --enable-deterministic-inference --enable-memory-saver",
        ),
    ],
)
def test_snapshot(options: dict[str, Any], expected: str) -> None:
    line = " ".join(sglang_arguments(SglangOptions(**options), model_path="M", port=30000))
    assert line == " ".join(f"{HEAD} {expected} --skip-server-warmup".split())


def test_nodes_seed_version_and_extra() -> None:
    line = sglang_arguments(
        SglangOptions(tensor_parallel=16),
        model_path="M",
        port=30000,
        dtype="bfloat16",
        context_length=4096,
        max_running_requests=64,
        seed=7,
        weight_version=0,
        num_nodes=2,
        node_rank=1,
        rendezvous="h:5000",
        extra=("--enable-metrics",),
    )
    assert " ".join(line[6:]) == (
        "--tp-size 16 --dtype bfloat16 --context-length 4096 --max-running-requests 64 --random-seed 7 "
        "--weight-version 0 --nnodes 2 --node-rank 1 --dist-init-addr h:5000 --skip-server-warmup --enable-metrics"
    )


def test_refusals() -> None:
    with pytest.raises(InvalidFieldError, match="rendezvous"):
        sglang_arguments(SglangOptions(), model_path="M", port=1, num_nodes=2)
    with pytest.raises(InvalidFieldError, match="node_rank: got 2"):
        sglang_arguments(SglangOptions(), model_path="M", port=1, num_nodes=2, node_rank=2, rendezvous="h:1")
    with pytest.raises(ValidationError, match="expert_parallel: got 3; it must divide tensor_parallel 4"):
        SglangOptions(tensor_parallel=4, expert_parallel=3)
    with pytest.raises(ValidationError, match="memory_fraction"):
        SglangOptions(memory_fraction=1.5)
    with pytest.raises(ValidationError, match="tensor_paralel"):
        SglangOptions(tensor_paralel=2)  # type: ignore[call-arg]


def test_environment() -> None:
    assert sglang_environment(SglangOptions()) == {}
    assert sglang_environment(SglangOptions(device="cpu")) == {"SGLANG_USE_CPU_ENGINE": "1"}


def test_gpus() -> None:
    assert SglangOptions(tensor_parallel=4, data_parallel=2).num_gpus == 8
