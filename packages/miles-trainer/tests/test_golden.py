"""Losses, gradients and advantages against numbers that TRL 1.16.0 gave for the same inputs.

The numbers came from `GRPOTrainer._compute_loss` of TRL 1.16.0 (torch 2.13.0, float64) called with the
log-probs, reference log-probs, masks and advantages below, `epsilon_low=0.2`, `epsilon_high=0.28` (CISPO: 1.28,
which TRL counts absolutely), `max_completion_length=20`, one process, no accumulation. Gradients are with respect
to the new log-probs, at unmasked positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from miles_trainer.advantages import group_advantages
from miles_trainer.batching import token_weights
from miles_trainer.config import AdvantageConfig, Aggregation, ObjectiveConfig
from miles_trainer.loss import StepSums, micro_batch_loss
from miles_trainer.objectives import Tokens

NEW = [-1.0, -2.5, -0.3, -1.2, -0.7, -2.0]
OLD = [-1.3, -2.4, -0.9, -1.9, -0.2, -2.1]
REFERENCE = [-1.1, -2.0, -0.4, -1.0, -0.9, -2.2]
SEGMENTS = [0, 0, 0, 1, 1, 2]
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5, 2.0]

# name: our configuration, TRL's loss, TRL's gradient
GOLDEN: dict[str, tuple[dict[str, Any], float, list[float]]] = {
    "grpo": (
        {"aggregation": "trajectory"},
        -0.8872831550985542,
        [0.0, -0.10053749089288438, 0.0, 0.1678127256225397, 0.0, -0.7367806120504318],
    ),
    "bnpo and dapo": (
        {"aggregation": "token"},
        -0.7113838167420029,
        [0.0, -0.15080623633932658, 0.0, 0.1678127256225397, 0.0, -0.3683903060252159],
    ),
    "dr_grpo": (
        {"aggregation": "constant", "aggregation_constant": 20.0},
        -0.0711383816742003,
        [0.0, -0.015080623633932658, 0.0, 0.016781272562253972, 0.0, -0.03683903060252159],
    ),
    "gspo (grpo with sequence-level ratios)": (
        {"aggregation": "trajectory", "kind": "gspo"},
        -0.9792521257044905,
        [0.0, 0.0, 0.0, 0.09209757650630397, 0.09209757650630397, -0.7367806120504318],
    ),
    "grpo with beta 0.05": (
        {"aggregation": "trajectory", "kl": {"coefficient": 0.05, "estimator": "k3"}},
        -0.8857565515826474,
        [
            0.0005286810109113357, -0.10414149795232955, 0.0005286810109113357,
            0.16596770263787164, 0.0015105770576834847, -0.7337594579350648,
        ],
    ),
    "dapo with delta 1.5 (dual clip)": (
        {"aggregation": "token", "dual_clip": 1.5},
        -0.7541965423645426,
        [0.0, -0.15080623633932658, 0.0, 0.0, 0.0, -0.3683903060252159],
    ),
    "cispo": (
        {"aggregation": "token", "kind": "cispo"},
        1.2277485810821782,
        [
            -0.21333333333333332, -0.15080623633932658, -0.21333333333333332,
            0.10666666666666666, 0.05054422164271945, -0.3683903060252159,
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(GOLDEN))
def test_loss_and_gradient_equal_trl(name: str) -> None:
    values, loss, gradient = GOLDEN[name]
    config = ObjectiveConfig.model_validate(values)
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    weights = token_weights(
        np.array([3, 2, 1]), np.arange(3), 3, Aggregation(config.aggregation), config.aggregation_constant
    )
    tokens = Tokens(
        engine=torch.tensor(OLD, dtype=torch.float64),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        weights=torch.from_numpy(weights[SEGMENTS]),
        segments=torch.tensor(SEGMENTS),
        num_segments=3,
    )
    reference = torch.tensor(REFERENCE, dtype=torch.float64) if config.kl.coefficient else None
    got, _ = micro_batch_loss(new, None, reference, tokens, config, StepSums.zero(torch.device("cpu")))
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-12)
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), gradient, rtol=1e-10, atol=1e-15)


def test_advantages_equal_trl() -> None:
    # TRL: (r - mean) / (std + 1e-4) with the unbiased std; numbers for rewards 0, 1, 0.25, 1
    rewards = np.array([0.0, 1.0, 0.25, 1.0])
    got = group_advantages(rewards, AdvantageConfig(epsilon=1e-4))
    want = [-1.0911985727810622, 0.8487100010519373, -0.6062214293228123, 0.8487100010519373]
    np.testing.assert_allclose(got, want, rtol=1e-7)  # part of TRL's std is float32
