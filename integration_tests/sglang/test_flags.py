"""Every flag that the launcher can emit is one that the installed SGLang's own parser takes, with its value."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from server import STUBS, sglang_python

from miles_qwen3.hardware import TARGETS
from miles_rollout.sglang_launch import (
    DisaggregationMode,
    DisaggregationOptions,
    SglangOptions,
    SpeculativeOptions,
    sglang_arguments,
)

pytestmark = pytest.mark.sglang

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
ServerArgs.add_cli_args(parser)
known = {option for action in parser._actions for option in action.option_strings}
answers = []
for line in json.load(sys.stdin):
    unknown = [word for word in line if word.startswith("--") and word not in known]
    deprecated = [
        word for action in parser._actions for word in line
        if word in action.option_strings and "deprecated" in str(action.help).lower()[:40]
    ]
    try:
        problem = "" if unknown else str(parser.parse_known_args(line)[1] or "")
    except argparse.ArgumentError as error:
        problem = str(error)
    answers.append({"unknown": unknown, "deprecated": deprecated, "problem": problem})
json.dump(answers, open(sys.argv[1], "w"))
"""
EVERYTHING = SglangOptions(
    tensor_parallel=8,
    data_parallel=2,
    pipeline_parallel=2,
    expert_parallel=8,
    attention_data_parallel=4,
    memory_fraction=0.8,
    quantization="fp8",
    kv_cache_dtype="fp8_e4m3",
    device="cuda",
    attention_backend="fa3",
    sampling_backend="flashinfer",
    moe_runner_backend="deep_gemm",
    moe_a2a_backend="deepep",
    chunked_prefill_size=8192,
    max_total_tokens=100000,
    cuda_graph=False,
    overlap_schedule=False,
    sleep_on_idle=True,
    speculative=SpeculativeOptions(
        algorithm="EAGLE", num_steps=3, eagle_topk=1, num_draft_tokens=4, draft_model_path="draft"
    ),
    disaggregation=DisaggregationOptions(
        mode=DisaggregationMode.DECODE, transfer_backend="nixl", bootstrap_port=8998, ib_device="mlx5_0"
    ),
    routed_experts=True,
    deterministic=True,
    memory_saver=True,
)
BACKENDS = (
    [SglangOptions(attention_backend=name) for name in ("fa3", "flashinfer", "triton", "torch_native", "trtllm_mha")]
    + [SglangOptions(quantization=name) for name in ("fp8", "mxfp8", "modelopt_fp4", "w4afp8")]
    + [SglangOptions(moe_runner_backend=name) for name in ("deep_gemm", "triton", "flashinfer_trtllm")]
    + [SglangOptions(moe_a2a_backend=name) for name in ("deepep", "mooncake", "nixl")]
    + [SglangOptions(disaggregation=DisaggregationOptions(mode=mode)) for mode in DisaggregationMode]
)
"""The values that descriptions of the options name."""


def parsed(lines: list[list[str]], answer: os.PathLike[str]) -> list[dict[str, object]]:
    """What SGLang's parser says of each command line."""
    environment = {**os.environ, "PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sglang_python(), "-c", PARSE, str(answer)]
    subprocess.run(command, input=json.dumps(lines), text=True, env=environment, check=True, capture_output=True)
    with open(answer) as file:
        found: list[dict[str, object]] = json.load(file)
    return found


def line_of(options: SglangOptions) -> list[str]:
    """A command line with every argument that the launcher knows."""
    return sglang_arguments(
        options,
        model_path="model",
        port=30000,
        dtype="bfloat16",
        context_length=4096,
        max_running_requests=64,
        seed=1,
        weight_version=0,
        num_nodes=2,
        node_rank=1,
        rendezvous="host:5000",
    )


def test_sglangs_parser_takes_every_flag(tmp_path) -> None:
    targets = [SglangOptions(**target.overrides["engine"]["sglang"]) for target in TARGETS]
    options = [EVERYTHING, *BACKENDS, *targets]
    unset = [name for name, field in SglangOptions.model_fields.items() if getattr(EVERYTHING, name) == field.default]
    assert unset == [], "give EVERYTHING a value that puts this option on the command line"
    lines = [line_of(o) for o in options]
    answers = parsed(lines, tmp_path / "answer.json")
    assert len(answers) == len(lines)
    good = {"unknown": [], "deprecated": [], "problem": ""}
    wrong = [(" ".join(line), a) for line, a in zip(lines, answers, strict=True) if a != good]
    assert wrong == []


def test_the_parser_would_notice(tmp_path) -> None:
    lines = [["--model-path", "m", "--tp-sice", "2"], ["--model-path", "m", "--attention-backend", "none-such"]]
    misspelt, no_choice = parsed(lines, tmp_path / "answer.json")
    assert misspelt["unknown"] == ["--tp-sice"]
    assert "none-such" in str(no_choice["problem"])
