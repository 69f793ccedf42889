"""Exported weights are exactly what `save_pretrained` writes, one group of tensors at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_contracts import Group
from miles_trainer import Trainer, TrainerConfig, export

Folder = Callable[..., Path]
FAMILIES = ["qwen3", "llama", "gemma2", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "minimax_m2"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        out |= load_file(path)
    return out


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next", "nemotron_h"])
def test_names_and_values_are_those_of_a_checkpoint(family: str, model_folder: Folder) -> None:
    trainer = Trainer(model_folder(family), TrainerConfig(), seed=0)
    want = stored(model_folder(family))
    got = list(trainer.export_weights())
    assert [name for name, _ in got] == sorted(want)
    for name, tensor in got:
        assert torch.equal(tensor, want[name]), name
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
    specs = trainer.weight_manifest().tensors
    assert [(s.name, s.shape, s.dtype, s.digest) for s in specs] == [
        (name, tuple(t.shape), "float32", None) for name, t in got
    ]


def test_experts_are_unfused(model_folder: Folder) -> None:
    names = {s.name for s in Trainer(model_folder("qwen3_moe"), TrainerConfig(), seed=0).weight_manifest().tensors}
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_tied_embeddings_appear_once(model_folder: Folder) -> None:
    trainer = Trainer(model_folder("qwen3", tie_word_embeddings=True), TrainerConfig(), seed=0)
    names = [name for name, _ in trainer.export_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert names == [s.name for s in trainer.weight_manifest().tensors]


def test_manifest_follows_version_and_dtype(model_folder: Folder, make_groups: Callable[..., list[Group]]) -> None:
    trainer = Trainer(model_folder("qwen3"), TrainerConfig(dtype="bfloat16"), seed=0)
    trainer.train_step(make_groups())
    manifest = trainer.weight_manifest()
    assert manifest.version == 1
    assert {s.dtype for s in manifest.tensors} == {"bfloat16"}


def test_plain_tensors_are_not_copied(model_folder: Folder) -> None:
    trainer = Trainer(model_folder("qwen3"), TrainerConfig(), seed=0)
    live = {p.data_ptr() for p in trainer.backend.policy.model.parameters()}
    assert all(t.data_ptr() in live for _, t in trainer.export_weights())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_at_most_one_layer_is_converted_at_a_time(
    family: str, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model_folder(family), TrainerConfig(), seed=0)
    sizes: list[int] = []
    convert = export.canonical

    def watch(model: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not any(t.is_meta for t in tensors.values()):
            sizes.append(len(tensors))
        return convert(model, tensors)

    monkeypatch.setattr(export, "canonical", watch)
    list(trainer.export_weights())
    assert max(sizes) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_what_leaves_lies_side_by_side_in_memory(tied: bool, model_folder: Folder) -> None:
    trainer = Trainer(model_folder("qwen3", tie_word_embeddings=tied), TrainerConfig(), seed=0)
    tensors = [tensor for _, tensor in trainer.export_weights()]
    block, end = tensors[0].untyped_storage(), 0
    for tensor in tensors:
        assert tensor.untyped_storage().data_ptr() == block.data_ptr()
        assert tensor.storage_offset() * tensor.element_size() == end
        end += -(-tensor.nbytes // 64) * 64
