"""The models are Qwen3 as transformers knows it, made of a shape and a seed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_qwen3.model import (
    COPYING_NOISE,
    MOE,
    TINY,
    Shape,
    build_moe,
    build_tiny,
    build_tiny_tools,
    copying_attention,
    tensor_shapes,
)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (build_tiny, "Qwen3ForCausalLM"),
        (build_tiny_tools, "Qwen3ForCausalLM"),
        (build_moe, "Qwen3MoeForCausalLM"),
    ],
)
def test_transformers_loads_every_tensor(tmp_path: Path, build: Callable[[Path, int], None], kind: str) -> None:
    build(tmp_path, 3)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == kind
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("sort cab", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], len(tokenizer))
    assert torch.isfinite(logits).all()
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id[0] == tokenizer.eos_token_id


def test_an_untrained_policy_is_close_to_uniform(tmp_path: Path) -> None:
    build_tiny(tmp_path, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort cabbac"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    logprobs = torch.log_softmax(model(**ids).logits[0, -1].detach(), -1)
    entropy = float(-(logprobs.exp() * logprobs).sum())
    assert entropy > 0.9 * torch.log(torch.tensor(float(len(tokenizer))))


@pytest.mark.parametrize("build", [build_tiny, build_tiny_tools, build_moe])
def test_same_seed_same_bytes_other_seed_other_weights(tmp_path: Path, build: Callable[[Path, int], None]) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        folder.mkdir()
        build(folder, seed)
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[1] / file.name).read_bytes()
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] != weights[2]


@pytest.mark.parametrize(("shape", "low", "high"), [(TINY, 80_000, 120_000), (MOE, 200_000, 300_000)])
def test_size(shape: Shape, low: int, high: int) -> None:
    total = 0
    for _, sizes in tensor_shapes(shape, 290):
        count = 1
        for size in sizes:
            count *= size
        total += count
    assert low < total < high


def test_with_copying_attention_what_stands_in_the_context_is_likelier(tmp_path: Path) -> None:
    """For every note: the model of the tool game gives it more than chance and more than a place not named."""
    notes = "0123"
    chances = {}
    for build in (build_tiny, build_tiny_tools):
        folder = tmp_path / build.__name__
        folder.mkdir()
        build(folder, 0)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        prompts = [f"<|im_start|>user\n{note}<|im_end|>\n<|im_start|>assistant\n" for note in notes]
        logits = model(**tokenizer(prompts, return_tensors="pt")).logits[:, -1].detach()
        picked = tokenizer.convert_tokens_to_ids(list(notes))
        chances[build] = torch.softmax(logits, -1)[:, picked]
    named = chances[build_tiny_tools].diagonal()
    absent = (chances[build_tiny_tools].sum(0) - named) / (len(notes) - 1)
    assert (named > 1.5 * absent).all()
    plain = chances[build_tiny].diagonal() / ((chances[build_tiny].sum(0) - chances[build_tiny].diagonal()) / 3)
    assert (named / absent).mean() > plain.mean()


def test_copying_attention_is_a_projection_with_a_little_noise() -> None:
    tensors = copying_attention(np.random.default_rng(0), TINY)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: sizes for name, sizes in tensor_shapes(TINY, 290) if "v_proj" in name or "o_proj" in name
    }
    group = TINY.heads // TINY.kv_heads
    for layer in range(TINY.layers):
        value = tensors[f"model.layers.{layer}.self_attn.v_proj.weight"]
        output = tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
        per_head = value.reshape(TINY.kv_heads, TINY.head_dim, TINY.hidden).repeat(group, axis=0)
        handed_on = output @ per_head.reshape(-1, TINY.hidden)
        assert np.abs(value @ value.T - np.eye(len(value))).max() < 1e-5
        assert np.abs(handed_on - value.T @ value).max() < 10 * COPYING_NOISE
