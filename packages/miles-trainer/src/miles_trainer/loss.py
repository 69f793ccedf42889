"""The loss of one micro-batch and the sums from which a step's metrics are made; shared by all backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_trainer.config import KlEstimator, ObjectiveConfig
from miles_trainer.objectives import Tokens, kl_terms, policy_loss, ratio_of
from miles_trainer.ranks import Ranks

_SUMS = (
    "loss",
    "policy_loss",
    "clipped",
    "abs_diff",
    "engine_kl",
    "ratio",
    "ratio_squared",
    "kept",
    "rejected",
    "logprob",
    "entropy",
    "reference_kl",
)


@dataclass
class StepSums:
    """Sums over the tokens of a step.

    Attributes:
        sums: float64 [len(_SUMS)].
        maximum: float64 scalar, largest |log trainer - log engine|.
    """

    sums: Tensor
    maximum: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> StepSums:
        """Before the first micro-batch."""
        return cls(
            sums=torch.zeros(len(_SUMS), dtype=torch.float64, device=device),
            maximum=torch.zeros((), dtype=torch.float64, device=device),
        )

    def over(self, ranks: Ranks) -> StepSums:
        """Of the step as a whole."""
        return StepSums(sums=ranks.total(self.sums), maximum=ranks.largest(self.maximum))

    def metrics(self, num_trained: int, config: ObjectiveConfig) -> dict[str, float]:
        """Means over the step's trained tokens."""
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        n = max(num_trained, 1)
        out = {
            "loss": total["loss"],
            "policy_loss": total["policy_loss"],
            "clip_fraction": total["clipped"] / n,
            "train_rollout_logprob_abs_diff": total["abs_diff"] / n,
            "train_rollout_logprob_abs_diff_max": float(self.maximum),
            "train_rollout_kl": total["engine_kl"] / n,
            "ratio_mean": total["ratio"] / n,
            "ess_ratio": total["ratio"] ** 2 / (n * total["ratio_squared"]) if total["ratio_squared"] else 1.0,
            "correction_weight": total["kept"] / n,
            "correction_rejected": total["rejected"] / n,
            "logprob": total["logprob"] / n,
        }
        if config.entropy_metric or config.entropy_coefficient:
            out["entropy"] = total["entropy"] / n
        if config.kl.coefficient or config.kl.monitor:
            out["kl_reference"] = total["reference_kl"] / n
        return out


def micro_batch_loss(
    logprobs: Tensor,
    entropies: Tensor | None,
    reference: Tensor | None,
    tokens: Tokens,
    config: ObjectiveConfig,
    step: StepSums,
) -> tuple[Tensor, Tensor]:
    """Share of the step's loss (float64 scalar) and the weighted token losses [P] it sums.

    Args:
        logprobs: [P] of the policy, with gradient.
        entropies: [P] or None.
        reference: [P] log-probs of the frozen reference, or None.
        tokens: what else is known about the tokens.
        config: the objective.
        step: sums to which this micro-batch adds.
    """
    outcome = policy_loss(logprobs, tokens, config)
    total = outcome.loss
    reference_kl = logprobs.new_zeros(())
    if reference is not None:
        terms = kl_terms(logprobs - reference, config.kl.estimator)
        reference_kl = terms.detach().double().sum()
        if config.kl.coefficient:
            total = total + config.kl.coefficient * terms
    if entropies is not None and config.entropy_coefficient:
        total = total - config.entropy_coefficient * entropies
    weighted = tokens.weights * total.double()
    loss = weighted.sum()
    with torch.no_grad():
        gap = logprobs.double() - tokens.engine.double()
        ratio = ratio_of(gap)
        size = gap.abs()
        parts = [
            loss.detach(),
            (tokens.weights * outcome.loss.double()).sum(),
            outcome.clipped.sum(),
            size.sum(),
            kl_terms(-gap, KlEstimator.K3).sum(),
            ratio.sum(),
            ratio.square().sum(),
            outcome.kept.sum(),
            (outcome.kept == 0).sum(),
            logprobs.sum(),
            logprobs.new_zeros(()) if entropies is None else entropies.sum(),
            reference_kl,
        ]
        step.sums += torch.stack([p.double() for p in parts])
        if len(size):
            step.maximum = torch.maximum(step.maximum, size.max())
    return loss, weighted
