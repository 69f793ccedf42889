"""The models are Qwen3 as transformers knows it, made of a shape and a seed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_qwen3.model import MOE, TINY, Shape, build_moe, build_tiny, tensor_shapes


@pytest.mark.parametrize(("build", "kind"), [(build_tiny, "Qwen3ForCausalLM"), (build_moe, "Qwen3MoeForCausalLM")])
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


@pytest.mark.parametrize("build", [build_tiny, build_moe])
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
