"""Configuration of the trainer: every field is checked where it is written, unknown keys are refused."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Estimator(StrEnum):
    """How rewards become advantages."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"

    @property
    def compares(self) -> bool:
        """True when the members of a group are compared, so that a group of one teaches nothing."""
        return self is not Estimator.REINFORCE_PP


class ObjectiveKind(StrEnum):
    """The loss of one token."""

    CLIP = "clip"
    GSPO = "gspo"
    CISPO = "cispo"
    SFT = "sft"


class Aggregation(StrEnum):
    """How token losses become one number. Denominators count the whole step, never one micro-batch."""

    TOKEN = "token"
    """Sum over trained tokens / number of trained tokens."""
    TRAJECTORY = "trajectory"
    """Mean over group members of the mean over a member's trained tokens (its branches together)."""
    CONSTANT = "constant"
    """Sum over trained tokens / (number of members x `aggregation_constant`)."""


class OldLogprobs(StrEnum):
    """Which policy is in the denominator of the importance ratio."""

    ENGINE = "engine"
    """The engine's log-probs at sampling time."""
    RECOMPUTED = "recomputed"
    """The trainer's own log-probs before the update. A step makes one update, so they are the log-probs of the
    training pass itself, detached: the ratio is 1 and no extra pass is needed. Combine with a correction."""


class KlEstimator(StrEnum):
    """Estimator of KL(policy || reference) per token, d = log policy - log reference."""

    K1 = "k1"
    """d. As an in-loss term its expected gradient is 0: useful for monitoring only."""
    K2 = "k2"
    """d^2 / 2."""
    K3 = "k3"
    """exp(-d) - 1 + d."""


class CorrectionKind(StrEnum):
    """What is done with w = exp(log trainer - log engine), the gap between trainer and engine."""

    NONE = "none"
    TRUNCATE = "truncate"
    """Multiply the loss by min(w, `high`)."""
    POP = "pop"
    """Multiply by w inside [`low`, `high`], by 0 outside."""


class Level(StrEnum):
    """Over what w is taken."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """exp of the sum over a trajectory's trained tokens."""
    GEOMETRIC = "geometric"
    """exp of the mean over a trajectory's trained tokens."""


class AdvantageConfig(_Config):
    """Rewards to advantages."""

    estimator: Estimator = Estimator.GRPO
    """`grpo`, `dr_grpo`, `rloo`, `reinforce_pp` or `reinforce_pp_baseline`."""
    std_normalization: bool = True
    """GRPO only: divide by the group's standard deviation."""
    std: Literal["unbiased", "biased"] = "unbiased"
    """Bessel-corrected (divide by n - 1, as torch.std) or population (divide by n, as numpy.std)."""
    epsilon: Positive = 1e-6
    """Added to a standard deviation before dividing."""


class CorrectionConfig(_Config):
    """Corrections for the gap between engine and trainer arithmetic."""

    kind: CorrectionKind = CorrectionKind.NONE
    """`none`, `truncate` (truncated importance sampling) or `pop` (clip-or-pop)."""
    level: Level = Level.TOKEN
    """Over what the weight is taken: `token`, `sequence` or `geometric`."""
    low: NonNegative = 0.5
    """Lower bound of the band of `pop`."""
    high: Positive = 2.0
    """Upper bound of `truncate` and `pop`."""
    mask_level: Literal["none", "sequence", "geometric"] = "none"
    """Give whole trajectories outside [`mask_low`, `mask_high`] weight 0."""
    mask_low: NonNegative = 0.5
    """Lower bound of the band of `mask_level`."""
    mask_high: Positive = 2.0
    """Upper bound of the band of `mask_level`."""
    veto: Fraction = 0.0
    """A trajectory with any token whose w is below this gets weight 0; 0 turns it off."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if self.mask_low >= self.mask_high:
            raise ValueError(f"mask_low ({self.mask_low}) must be below mask_high ({self.mask_high})")
        if self.kind is CorrectionKind.POP and self.level is not Level.TOKEN:
            raise ValueError("kind 'pop' works on tokens; set level to 'token', or use mask_level for trajectories")
        return self


class KlConfig(_Config):
    """Distance to a frozen reference. The reference is loaded only if `coefficient` != 0 or `monitor`."""

    coefficient: NonNegative = 0.0
    """Weight of the divergence in the loss."""
    estimator: KlEstimator = KlEstimator.K3
    """`k1`, `k2` or `k3`."""
    monitor: bool = False
    """Report `kl_reference` without adding it to the loss."""
    reference_path: Path | None = None
    """Model folder of the reference; None is the model the trainer starts from."""


class ObjectiveConfig(_Config):
    """Loss of a step."""

    kind: ObjectiveKind = ObjectiveKind.CLIP
    """`clip` (PPO's clipped ratio), `gspo`, `cispo` or `sft`. GSPO wants aggregation `trajectory`."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_low (CISPO has no lower bound)."""
    clip_high: Positive = 0.28
    """The ratio is clipped above at 1 + clip_high (for CISPO, the weight)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages the loss is at most this times |advantage|; None is off."""
    old_logprobs: OldLogprobs = OldLogprobs.ENGINE
    """The denominator of the ratio: `engine`, or `recomputed` (ratio 1; combine with a correction)."""
    aggregation: Aggregation = Aggregation.TOKEN
    """`token`, `trajectory` or `constant`; denominators count the whole step."""
    aggregation_constant: Positive | None = None
    """Denominator per member for `constant`, usually the maximum response length."""
    entropy_coefficient: float = 0.0
    """The mean token entropy times this is subtracted from the loss."""
    entropy_metric: bool = True
    """Report the entropy although its coefficient is 0."""
    kl: KlConfig = KlConfig()
    """Distance to a frozen reference model."""
    correction: CorrectionConfig = CorrectionConfig()
    """What is done about the gap between engine and trainer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.aggregation is Aggregation.CONSTANT) != (self.aggregation_constant is not None):
            raise ValueError("aggregation_constant is given exactly when aggregation is 'constant'")
        weighted = self.correction.kind is not CorrectionKind.NONE
        if weighted and self.old_logprobs is OldLogprobs.ENGINE and self.kind is not ObjectiveKind.SFT:
            raise ValueError(
                "old_logprobs 'engine' already weighs by policy / engine, so correction.kind would count the gap "
                "twice; set old_logprobs to 'recomputed', or use only correction.mask_level and correction.veto"
            )
        return self


class ScheduleConfig(_Config):
    """Learning-rate factor as a function of the number of updates made."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The factor rises linearly to 1 over this many updates."""
    total_steps: Annotated[int, Field(gt=0)] | None = None
    """Update at which linear and cosine reach `final_factor`."""
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Factor that linear and cosine end with."""

    @model_validator(mode="after")
    def _total(self) -> Self:
        if self.kind != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(f"schedule {self.kind!r} needs total_steps greater than warmup_steps")
        return self


class OptimizerConfig(_Config):
    """AdamW. Master weights and moments are float32 whatever the model's dtype."""

    lr: NonNegative = 1e-6
    """Base learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled; not applied to tensors of fewer than two dimensions (norms, biases)."""
    max_grad_norm: Positive | None = 1.0
    """Global L2 norm to which gradients are clipped; None turns clipping off."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate factor over updates."""


class BatchingConfig(_Config):
    """How a step is cut into micro-batches. It changes speed and memory, never the result."""

    max_tokens: Annotated[int, Field(gt=0)] = 16384
    """Tokens in a micro-batch (padding included); one longer trajectory makes a micro-batch of its own."""
    share_prefixes: bool = True
    """Compute a prompt once for all its trajectories in a micro-batch, where the packing allows it."""
    logits_bytes: Annotated[int, Field(ge=1 << 16)] = 256 << 20
    """Bytes of logits that exist at any time."""
    packing: Literal["auto", "varlen", "block_diagonal", "padded"] = "auto"
    """How several trajectories share a micro-batch; auto takes the first that the model's structure allows."""


class ReplayConfig(_Config):
    """Rollout routing replay for mixture-of-experts models."""

    enabled: bool = True
    """Replay the engine's expert choices; ignored for dense models."""
    incomplete: Literal["refuse", "mask"] = "refuse"
    """A trajectory without a complete trace: refuse the step, or exclude the trajectory and count it."""
    aux_loss_coefficient: NonNegative = 0.0
    """Weight of the load-balancing loss (counts of the choices really used, over the whole step)."""


class TrainerConfig(_Config):
    """All of the trainer."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss of a step."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    batching: BatchingConfig = BatchingConfig()
    """Micro-batches."""
    replay: ReplayConfig = ReplayConfig()
    """Routing replay of mixtures of experts."""
    device: str = "auto"
    """torch device; auto is cuda when there is one, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights in the forward pass; auto keeps the model folder's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
