"""Tiny Qwen3 and Qwen3-MoE models that SGLang and the embedded engine both serve."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, TOP_K, LAYERS = 8, 2, 2
_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    # large enough that the likeliest token stands clear of the next, so that rounding does not choose
    "initializer_range": 0.15,
    # SGLang's Qwen3-MoE has no tied form, as the real models have none: it would serve an empty head
    "tie_word_embeddings": False,
}


def write_dense(folder: Path, seed: int) -> None:
    """Write a random dense model as a Hugging Face folder."""
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**_SIZES)).save_pretrained(folder)


def write_moe(folder: Path, seed: int, inner: int = 32) -> None:
    """Write a random mixture-of-experts model, with experts of this inner size, as a Hugging Face folder."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**_SIZES, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=inner)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
