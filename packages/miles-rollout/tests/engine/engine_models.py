"""Tiny random causal LMs of several families, made from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_DSA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 256,
}


def _config(name: str, **fields: Any) -> Any:
    return getattr(transformers, name)(**{**_BASE, **fields})


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: _config("Qwen3Config", head_dim=8, tie_word_embeddings=True),
    "llama": lambda: _config("LlamaConfig", tie_word_embeddings=False),
    "llama_bias": lambda: _config("LlamaConfig", attention_bias=True, mlp_bias=True),
    "qwen2": lambda: _config("Qwen2Config"),
    "mistral": lambda: _config("MistralConfig", sliding_window=8),
    "gemma2": lambda: _config(
        "Gemma2Config", head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, **_SLIDING
    ),
    "gemma3": lambda: _config("Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, **_SLIDING),
    "gpt_oss": lambda: _config("GptOssConfig", head_dim=8, num_local_experts=4, num_experts_per_tok=2, **_SLIDING),
    "qwen3_moe": lambda: _config("Qwen3MoeConfig", head_dim=8, **_MOE),
    "glm4_moe": lambda: _config(
        "Glm4MoeConfig",
        head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    ),
    "deepseek_v3": lambda: _config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "minimax_m2": lambda: _config(
        "MiniMaxM2Config", num_local_experts=8, num_experts_per_tok=2, head_dim=8, rotary_dim=4
    ),
    "glm_moe_dsa": lambda: _config("GlmMoeDsaConfig", **_DSA),
    "deepseek_v32": lambda: _config("DeepseekV32Config", **_DSA),
    "qwen3_next": lambda: _config("Qwen3NextConfig", **_LINEAR, **_MOE, shared_expert_intermediate_size=16),
}


def make_model(family: str, seed: int = 0) -> Any:
    """A random float32 model in eval mode."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases start at zero, which would hide one that is left out
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model.eval()


def save_model(family: str, folder: Path, seed: int = 0) -> None:
    """Write a random model as a Hugging Face folder."""
    make_model(family, seed).save_pretrained(folder)


def float64_model(family: str, seed: int = 0) -> Any:
    """The same weights in float64; the experts one by one, for the grouped kernel has no float64."""
    model = make_model(family, seed).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model
