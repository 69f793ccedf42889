"""Loss and gradient are the same whatever the micro-batches, the packing and the order of groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_contracts import Group
from miles_trainer import Trainer, TrainerConfig

OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip-token": {},
    "clip-trajectory": {"aggregation": "trajectory", "dual_clip": 3.0},
    "clip-constant": {"aggregation": "constant", "aggregation_constant": 20.0},
    "gspo": {"kind": "gspo", "aggregation": "trajectory"},
    "cispo": {"kind": "cispo"},
    "corrected": {
        "old_logprobs": "recomputed",
        "entropy_coefficient": 0.01,
        "correction": {"kind": "truncate", "high": 2.0, "mask_level": "geometric", "mask_low": 0.01, "mask_high": 9.0},
    },
    "kl": {"kl": {"coefficient": 0.1}},
}


def gradients(
    folder: Path, groups: list[Group], objective: dict[str, Any], **batching: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of a step and the gradient it applied (seen just before the update)."""
    trainer = Trainer(folder, TrainerConfig.model_validate({"objective": objective, "batching": batching}), seed=0)
    seen: dict[str, torch.Tensor] = {}
    optimizer = trainer.backend.optimizer
    step = optimizer.step

    def watch(lr: float) -> float:
        seen.update({n: g.clone() for n, g in optimizer.gradients().items()})
        return step(lr)

    optimizer.step = watch  # type: ignore[method-assign]
    return trainer.train_step(groups), seen


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_micro_batch_split_in_float64(
    name: str, model_folder: Callable[..., Path], make_groups: Callable[..., list[Group]]
) -> None:
    folder = model_folder("qwen3", dtype="float64")
    groups = make_groups(num=3, size=4)
    whole, expected = gradients(folder, groups, OBJECTIVES[name], max_tokens=10_000)
    assert whole["micro_batches"] == 1
    for batching in ({"max_tokens": 40}, {"max_tokens": 1}, {"max_tokens": 60, "packing": "padded"}):
        split, got = gradients(folder, list(reversed(groups)), OBJECTIVES[name], **batching)
        assert split["micro_batches"] > 2
        for key, value in whole.items():
            if key not in ("micro_batches", "advantage_abs", "reward"):
                assert split[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
        for parameter, gradient in expected.items():
            torch.testing.assert_close(got[parameter], gradient, rtol=1e-8, atol=1e-11, msg=parameter)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_micro_batch_split_of_mixtures_and_hybrids(
    family: str, model_folder: Callable[..., Path], make_groups: Callable[..., list[Group]]
) -> None:
    layers = 4 if family == "qwen3_next" else 2
    groups = make_groups(num=2, size=3, routing=(layers, 2, 6))
    whole, expected = gradients(model_folder(family), groups, {})
    split, got = gradients(model_folder(family), groups, {}, max_tokens=30)
    assert split["micro_batches"] > whole["micro_batches"]
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    for parameter, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(got[parameter] / scale, gradient / scale, rtol=0, atol=2e-4, msg=parameter)


def test_gradient_checkpointing_changes_nothing(
    model_folder: Callable[..., Path], make_groups: Callable[..., list[Group]]
) -> None:
    groups = make_groups()
    results = []
    for checkpointing in (False, True):
        config = TrainerConfig(gradient_checkpointing=checkpointing)
        trainer = Trainer(model_folder("qwen3"), config, seed=0)
        results.append((trainer.train_step(groups), dict(trainer.export_weights())))
    assert results[0][0] == results[1][0]
    for name, tensor in results[0][1].items():
        assert torch.equal(tensor, results[1][1][name]), name


def test_loss_equals_the_formula_over_lone_trajectories(
    model_folder: Callable[..., Path], make_groups: Callable[..., list[Group]]
) -> None:
    """The whole chain at once, in float64: temperature, ratio, clip, advantage, mask, denominator."""
    from transformers import AutoModelForCausalLM

    folder = model_folder("qwen3", dtype="float64")
    groups = make_groups(num=2, size=4, temperature=0.7)
    metrics, got = gradients(folder, groups, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = np.array([t.reward for t in group])
        for t in group:
            advantage = (t.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            ids = torch.from_numpy(t.token_ids.astype(np.int64))
            table = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
            for i in np.flatnonzero(t.loss_mask):
                ratio = (table[i - 1, ids[i]] - float(t.logprobs[i])).exp()
                total = total + torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
                count += 1
    (total / count).backward()
    assert metrics["loss"] == pytest.approx(float(total.detach() / count), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-8, msg=name)
