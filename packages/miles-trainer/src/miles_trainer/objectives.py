"""Token losses from log-probs: pure tensor functions, the same for every backend.

Shapes: all vectors are [P], the trained tokens of one micro-batch; `segments` says which trajectory a token
belongs to. Denominators never appear here: token weights carry them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_trainer.config import (
    CorrectionConfig,
    CorrectionKind,
    KlEstimator,
    Level,
    ObjectiveConfig,
    ObjectiveKind,
    OldLogprobs,
)

_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: beyond e^20 a ratio carries no information but can overflow."""


@dataclass(frozen=True)
class Tokens:
    """Inputs of the loss of one micro-batch; P tokens of S trajectories.

    Attributes:
        engine: [P] engine log-probs.
        advantages: [P].
        weights: [P] share of each token in the step's loss.
        segments: int64 [P], non-decreasing.
        num_segments: S.
    """

    engine: Tensor
    advantages: Tensor
    weights: Tensor
    segments: Tensor
    num_segments: int


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token before weighting, and what was clipped.

    Attributes:
        loss: [P], differentiable.
        clipped: [P] bool, tokens whose gradient the clip removed (or capped, for CISPO).
        kept: [P], correction weight that multiplied the loss, 1 without correction.
    """

    loss: Tensor
    clipped: Tensor
    kept: Tensor


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Sum of `values` [P] per trajectory, [S]."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Mean of `values` [P] per trajectory, [S]; 0 where a trajectory has no tokens."""
    counts = torch.bincount(segments, minlength=num_segments).clamp_min(1)
    return segment_sum(values, segments, num_segments) / counts.to(values.dtype)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp with the exponent clamped to +-20."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clip_loss(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic clipped loss with separate bounds and optional dual clip; also which tokens were clipped."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    loss = torch.maximum(unclipped, clipped)
    hit = clipped > unclipped
    if dual is not None:
        ceiling = -dual * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        hit = hit | over
    return loss, hit


def policy_loss(logprobs: Tensor, tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """Loss of each token under `config.kind`, correction included; KL and entropy are added elsewhere."""
    ones = torch.ones_like(logprobs)
    if config.kind is ObjectiveKind.SFT:
        return TokenLoss(loss=-logprobs, clipped=torch.zeros_like(logprobs, dtype=torch.bool), kept=ones)
    old = logprobs.detach() if config.old_logprobs is OldLogprobs.RECOMPUTED else tokens.engine
    log_ratio = logprobs - old
    if config.kind is ObjectiveKind.GSPO:
        mean = segment_mean(log_ratio, tokens.segments, tokens.num_segments)
        ratio = ratio_of(mean)[tokens.segments]
        loss, hit = clip_loss(ratio, tokens.advantages, config.clip_low, config.clip_high, config.dual_clip)
    elif config.kind is ObjectiveKind.CISPO:
        # only the weight is capped, and only from above, so every token keeps a gradient
        ratio = ratio_of(log_ratio.detach())
        cap = ratio.clamp(max=1.0 + config.clip_high)
        loss, hit = -cap * tokens.advantages * logprobs, cap != ratio
    else:
        ratio = ratio_of(log_ratio)
        loss, hit = clip_loss(ratio, tokens.advantages, config.clip_low, config.clip_high, config.dual_clip)
    kept = correction_weights(logprobs.detach() - tokens.engine, tokens, config.correction)
    return TokenLoss(loss=loss * kept, clipped=hit, kept=kept)


def correction_weights(gap: Tensor, tokens: Tokens, config: CorrectionConfig) -> Tensor:
    """Detached weight [P] of each token, from gap = log trainer - log engine [P].

    Rejected tokens weigh 0 and stay in the denominators, which count the step before any rejection: so the
    loss cannot depend on which tokens share a micro-batch.
    """
    weights = torch.ones_like(gap)
    if config.kind is not CorrectionKind.NONE:
        ratio = _level_ratio(gap, tokens, config.level)
        if config.kind is CorrectionKind.TRUNCATE:
            weights = ratio.clamp(max=config.high)
        else:
            weights = torch.where((ratio >= config.low) & (ratio <= config.high), ratio, torch.zeros_like(ratio))
    if config.mask_level != "none":
        ratio = _level_ratio(gap, tokens, Level(config.mask_level))
        weights = weights * ((ratio >= config.mask_low) & (ratio <= config.mask_high))
    if config.veto > 0:
        bad = (ratio_of(gap) < config.veto).to(gap.dtype)
        vetoed = segment_sum(bad, tokens.segments, tokens.num_segments) > 0
        weights = weights * ~vetoed[tokens.segments]
    return weights


def _level_ratio(gap: Tensor, tokens: Tokens, level: Level) -> Tensor:
    if level is Level.TOKEN:
        return ratio_of(gap)
    reduce = segment_sum if level is Level.SEQUENCE else segment_mean
    return ratio_of(reduce(gap, tokens.segments, tokens.num_segments))[tokens.segments]


def kl_terms(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || other) from log policy - log other, samples from the policy."""
    if estimator is KlEstimator.K1:
        return log_ratio
    if estimator is KlEstimator.K2:
        return 0.5 * log_ratio.square()
    clamped = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (-clamped).exp() - 1.0 + clamped
