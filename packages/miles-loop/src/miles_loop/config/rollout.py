"""Settings of the answers to train on: how they are sampled, grouped, bounded and thrown away."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from miles_loop.config.section import NonNegative, Positive, Seconds, Section
from miles_rollout.order import TrainingOrder


class SamplingConfig(Section):
    """How the policy's answers are sampled."""

    max_new_tokens: Positive = 128
    """Longest answer in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits before the softmax; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: smallest set of tokens with this probability; 1 is off."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""

    @field_validator("top_k")
    @classmethod
    def _top_k_means_something(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("use -1 (off) or a value of 1 or more")
        return value

    @field_validator("stop")
    @classmethod
    def _stops_are_not_empty(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if "" in values:
            raise ValueError("an empty string would end every answer at once; leave it out")
        return values


class UnusedPrompts(StrEnum):
    """What happens to the prompt of a group that is not trained."""

    RETRY = "retry"
    DROP = "drop"


class Granularity(StrEnum):
    """When a group's share of the bounds in flight is free again."""

    SAMPLE = "sample"
    GROUP = "group"


class RolloutConfig(Section):
    """How groups of answers are made and when they are thrown away."""

    groups_per_step: Positive = 16
    """Groups (prompts) in one training batch."""
    group_size: Positive = 8
    """Answers sampled per prompt."""
    order: TrainingOrder = TrainingOrder.ARRIVAL
    """Order of training: finished groups of the oldest weights first (`arrival`), or strictly the order of the
    prompts (`prompt`): the same sequence in every run and across a resume as long as the same groups are dropped, but a
    slow group holds up later ones. Above depth 0 a filter such as `no_signal` drops by what was sampled: use `none`."""
    max_staleness: NonNegative | None = None
    """Oldest usable group, in optimiser updates behind the weights that will train on it; default: the pipeline
    depth + 1."""
    on_failure: UnusedPrompts = UnusedPrompts.RETRY
    """The prompt of a group whose generation or reward failed: sample it again (`retry`) or `drop` it (counted)."""
    on_stale: UnusedPrompts = UnusedPrompts.RETRY
    """The prompt of a group that grew too stale: sample it again (`retry`) or `drop` it (counted)."""
    max_attempts: Positive = 3
    """How often one prompt is tried before it is given up (and counted)."""
    replace_members: NonNegative = 0
    """Sample a failed answer of a group again this often before its whole group counts as failed."""
    filter: str = "no_signal"
    """`no_signal` drops groups whose rewards are all equal (they carry no gradient); `none` keeps all; or your
    function `pkg.mod:fn`, which takes a group and says whether to keep it."""
    max_in_flight: Positive | None = None
    """Most answers under way at the same time; default: what the pipeline depth admits."""
    max_tokens_in_flight: Positive | None = None
    """Most tokens (longest prompt and answer of each) under way at the same time; default: no bound."""
    granularity: Granularity = Granularity.SAMPLE
    """An answer frees its slot at once (`sample`), or all of a group's together when the last is done (`group`)."""
    buffer_groups: Positive | None = None
    """Most finished groups that wait for the trainer; default: 2 x `groups_per_step`."""
    buffer_mib: Positive = 1024
    """Most memory in MiB for finished groups that wait for the trainer."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt; a longer one is refused with its position in the stream. Default: what the engine fits."""
    timeout_s: Seconds = 600.0
    """Deadline for one answer (or one agent episode), reward included."""
    reward_timeout_s: Seconds = 60.0
    """Deadline for scoring one answer."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training answers."""
