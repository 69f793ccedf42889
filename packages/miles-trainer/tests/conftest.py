"""Tiny models of several families and trajectories for them, made on the spot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

from miles_contracts import (
    Group,
    RoutingTrace,
    SamplingTransform,
    Status,
    Trajectory,
    TrajectoryIdentity,
    VersionSpan,
)

VOCAB = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # large enough that a wrong mask or a wrong route shows in the log-probs
    "initializer_range": 0.3,
}
_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
_SPARSE_MLA = {**_MLA, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
_LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "qwen3_moe": {**_MOE, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, **_MLA},
    "deepseek_v32": {**_DEEPSEEK, **_SPARSE_MLA},
    "glm_moe_dsa": {**_DEEPSEEK, **_SPARSE_MLA},
    "glm4_moe_lite": {**_DEEPSEEK, **_MLA},
    # the first layer routes by a table of token ids
    "deepseek_v4": {**_DEEPSEEK, "num_local_experts": 8, "num_hash_layers": 1},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 4},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": _LINEAR_ATTENTION,
    "qwen3_5_moe_text": {**_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention", "full_attention"],
    },
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 2},
    "afmoe": {**_MOE, "num_dense_layers": 1, "num_hidden_layers": 3},
    "mimo_v2_flash": _DEEPSEEK,
    "nemotron_h": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "num_hidden_layers": 4,
    },
    "qwen3_next": {**_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16},
}


def make_model(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """A random model of a family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    values = {**_COMMON, **FAMILIES[family], **overrides}
    if "qk_rope_head_dim" in values:
        del values["head_dim"]
    config = AutoConfig.for_model(family, **values)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
        if name.endswith("tid2eid"):
            table = torch.rand(len(buffer), config.n_routed_experts).argsort(-1)[:, : buffer.shape[1]]
            buffer.copy_(table)
    return model.to(getattr(torch, dtype))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a family (and configuration overrides) to a saved model folder, made once."""
    made: dict[str, Path] = {}

    def get(family: str, **overrides: Any) -> Path:
        key = f"{family}-{sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("models") / family
            make_model(family, **overrides).save_pretrained(folder)
            made[key] = folder
        return made[key]

    return get


def trajectory(
    *,
    prompt: int = 0,
    member: int = 0,
    leaf: int = 0,
    total: int = 12,
    start: int = 5,
    reward: float | None = 1.0,
    status: Status = Status.FINISHED,
    seed: int = 0,
    temperature: float = 1.0,
    holes: bool = False,
    vocab: int = VOCAB,
    routing: tuple[int, int, int] | None = None,
) -> Trajectory:
    """A random trajectory of `total` tokens whose tokens from `start` on were sampled.

    Args:
        holes: leave some sampled tokens out of the loss mask, as tool output would.
        routing: (layers, top_k, experts) of a random trace.
    """
    rng = np.random.default_rng([seed, prompt, member, leaf, total])
    mask = np.zeros(total, dtype=np.bool_)
    mask[start:] = True
    logprobs = np.full(total, np.nan, dtype=np.float32)
    logprobs[start:] = -rng.uniform(2.0, 6.0, total - start)
    if holes:
        mask[start + 1 : total - 1 : 3] = False
    trace = None
    if routing is not None:
        layers, top_k, experts = routing
        ids = np.argsort(rng.random((total - 1, layers, experts)), axis=-1)[..., :top_k]
        trace = RoutingTrace.of(ids, experts)
    return Trajectory(
        identity=TrajectoryIdentity(prompt_index=prompt, member=member, leaf=leaf),
        token_ids=rng.integers(3, vocab, total).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=(VersionSpan(start=start, end=total, version=0),) if total > start else (),
        status=status,
        sampling=SamplingTransform(temperature=temperature),
        reward=reward,
        routing=trace,
    )


def random_groups(
    num: int = 3,
    size: int = 4,
    *,
    seed: int = 0,
    shortest: int = 7,
    longest: int = 20,
    routing: tuple[int, int, int] | None = None,
    temperature: float = 1.0,
    vocab: int = VOCAB,
) -> list[Group]:
    """Groups of ragged random trajectories with rewards 0 and 1."""
    rng = np.random.default_rng(seed)
    groups = []
    for prompt in range(num):
        start = int(rng.integers(2, 6))
        members = [
            trajectory(
                prompt=prompt,
                member=m,
                total=int(rng.integers(shortest, longest)),
                start=start,
                reward=float((m + prompt) % 3 == 0),
                seed=seed,
                holes=m % 2 == 0,
                temperature=temperature,
                routing=routing,
                vocab=vocab,
            )
            for m in range(size)
        ]
        groups.append(Group(prompt_index=prompt, size=size, trajectories=tuple(members)))
    return groups


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    """`trajectory`, for tests that cannot import this file."""
    return trajectory


@pytest.fixture(scope="session")
def make_groups() -> Callable[..., list[Group]]:
    """`random_groups`, for tests that cannot import this file."""
    return random_groups


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """`make_model`, for tests that cannot import this file."""
    return make_model
