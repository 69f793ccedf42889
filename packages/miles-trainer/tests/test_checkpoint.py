"""Checkpoints continue bit for bit, appear whole, and refuse to load when anything is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_contracts import Group, InvalidFieldError
from miles_trainer import CheckpointError, Trainer, TrainerConfig, checkpoint

Folder = Callable[..., Path]
Groups = Callable[..., list[Group]]
CONFIG = TrainerConfig.model_validate(
    {
        "optimizer": {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "schedule": {"kind": "cosine", "warmup_steps": 2, "total_steps": 9},
        },
        "objective": {"kl": {"coefficient": 0.01}},
    }
)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.export_weights()}


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32"), ("gpt_oss", "float32")]
)
def test_resumed_run_is_bit_equal(
    family: str, dtype: str, model_folder: Folder, make_groups: Groups, tmp_path: Path
) -> None:
    routing = None if family == "qwen3" else (2, 2, 6)
    steps = [make_groups(num=2, seed=s, routing=routing) for s in range(5)]
    config = CONFIG.model_copy(update={"dtype": dtype})
    straight = Trainer(model_folder(family), config, seed=3)
    expected = [straight.train_step(groups) for groups in steps]
    first = Trainer(model_folder(family), config, seed=3)
    got = [first.train_step(groups) for groups in steps[:2]]
    first.save(tmp_path / "ckpt")
    drawn = torch.rand(3)
    second = Trainer(model_folder(family), config, seed=99)
    second.load(tmp_path / "ckpt")
    assert second.version == 2
    assert torch.equal(torch.rand(3), drawn)
    got += [second.train_step(groups) for groups in steps[2:]]
    assert got == expected
    theirs = weights(straight)
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_saved_model_loads_in_transformers(
    family: str, model_folder: Folder, make_groups: Groups, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    routing = {"qwen3": None, "qwen3_moe": (2, 2, 6), "deepseek_v3": (2, 2, 8)}[family]
    trainer = Trainer(model_folder(family), CONFIG, seed=0)
    trainer.train_step(make_groups(routing=routing))
    trainer.save(tmp_path / "ckpt")
    trainer.export_hf(tmp_path / "alone")
    for folder in (tmp_path / "ckpt" / "hf", tmp_path / "alone"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        ours = trainer.backend.policy.model.state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, ours[name]), name
        assert "attn_implementation" not in (folder / "config.json").read_text()


def test_tokenizer_files_travel_along(model_folder: Folder, make_groups: Groups, tmp_path: Path) -> None:
    import shutil

    source = tmp_path / "model"
    shutil.copytree(model_folder("qwen3"), source)
    (source / "tokenizer.json").write_text('{"made": "up"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    trainer = Trainer(source, CONFIG, seed=0)
    trainer.save(tmp_path / "ckpt")
    hf = tmp_path / "ckpt" / "hf"
    assert (hf / "tokenizer.json").read_text() == '{"made": "up"}'
    assert (hf / "chat_template.jinja").exists()
    assert not (hf / "pytorch_model.bin").exists()


def saved(model_folder: Folder, make_groups: Groups, tmp_path: Path) -> tuple[Trainer, Path]:
    trainer = Trainer(model_folder("qwen3"), CONFIG, seed=0)
    trainer.train_step(make_groups())
    trainer.save(tmp_path / "ckpt")
    return trainer, tmp_path / "ckpt"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("trainer.json", Path.unlink, "not a finished checkpoint"),
        ("trainer.json", truncate, "damaged"),
        ("trainer.json", lambda p: p.write_text("[]"), "damaged"),
        ("optimizer.safetensors", Path.unlink, "missing"),
        ("optimizer.safetensors", truncate, "digest differs"),
        ("hf/model.safetensors", flip, "digest differs"),
        ("hf/config.json", flip, "digest differs"),
    ],
)
def test_damage_is_noticed_and_changes_nothing(
    name: str, damage: Any, message: str, model_folder: Folder, make_groups: Groups, tmp_path: Path
) -> None:
    _, folder = saved(model_folder, make_groups, tmp_path)
    damage(folder / name)
    other = Trainer(model_folder("qwen3"), CONFIG, seed=1)
    before = weights(other)
    with pytest.raises(CheckpointError, match=message):
        other.load(folder)
    assert other.version == 0
    for key, tensor in weights(other).items():
        assert torch.equal(tensor, before[key])
    other.train_step(make_groups())


def test_other_format_and_other_model_are_refused(model_folder: Folder, make_groups: Groups, tmp_path: Path) -> None:
    _, folder = saved(model_folder, make_groups, tmp_path)
    wider = Trainer(model_folder("qwen3", intermediate_size=64), CONFIG, seed=0)
    with pytest.raises(CheckpointError, match=r"another model:\n.*mlp\.down_proj\.weight: \(32, 64\) here, \(32, 48\)"):
        wider.load(folder)
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        wider.load(tmp_path / "nothing")
    meta = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({**meta, "format": 2}))
    with pytest.raises(CheckpointError, match="format 2, this code reads 1"):
        Trainer(model_folder("qwen3"), CONFIG, seed=0).load(folder)


def test_foreign_optimizer_state_is_refused(model_folder: Folder, make_groups: Groups, tmp_path: Path) -> None:
    trainer, folder = saved(model_folder, make_groups, tmp_path)
    read = checkpoint.read(folder, trainer.backend.policy.model)
    for key, tensor in (("exp_avg:no.such.parameter", torch.zeros(1)), ("exp_avg:lm_head.weight", torch.zeros(2))):
        foreign = checkpoint.Saved(version=1, optimizer={**read.optimizer, key: tensor}, rng=read.rng)
        with pytest.raises(CheckpointError, match="does not fit the model"):
            checkpoint.restore_optimizer(foreign, trainer.backend.optimizer)


def test_an_existing_checkpoint_is_never_overwritten(model_folder: Folder, make_groups: Groups, tmp_path: Path) -> None:
    trainer, folder = saved(model_folder, make_groups, tmp_path)
    with pytest.raises(InvalidFieldError, match="new or empty"):
        trainer.save(folder)
    with pytest.raises(InvalidFieldError, match="new or empty"):
        trainer.export_hf(folder)
    (tmp_path / "empty").mkdir()
    trainer.save(tmp_path / "empty")
    trainer.load(tmp_path / "empty")


@pytest.mark.parametrize("stage", ["model", "optimizer", "rename"])
def test_a_crash_while_saving_leaves_nothing(
    stage: str, model_folder: Folder, make_groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model_folder("qwen3"), CONFIG, seed=0)
    trainer.train_step(make_groups())

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if stage == "model":
        monkeypatch.setattr(trainer.backend.policy.model, "save_pretrained", fail)
    elif stage == "optimizer":
        monkeypatch.setattr("safetensors.torch.save_file", fail)
    else:
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []
    trainer.train_step(make_groups())


def test_version_zero_checkpoint(model_folder: Folder, make_groups: Groups, tmp_path: Path) -> None:
    trainer = Trainer(model_folder("qwen3"), CONFIG, seed=0)
    trainer.save(tmp_path / "ckpt")
    other = Trainer(model_folder("qwen3"), CONFIG, seed=0)
    other.load(tmp_path / "ckpt")
    assert other.version == 0
    assert np.isfinite(other.train_step(make_groups())["loss"])
