"""Settings of evaluation: when, where and how held-out problems are measured."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from miles_loop.config.rollout import SamplingConfig
from miles_loop.config.section import NonNegative, Positive, Seconds, Section


class EvaluationSamplingConfig(SamplingConfig):
    """How evaluation's answers are sampled: greedily unless told otherwise."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits before the softmax; 0 is greedy."""


class EvaluationMode(StrEnum):
    """Where held-out tasks are measured."""

    SHARED = "shared"
    DEDICATED = "dedicated"
    EXTERNAL = "external"


class EvaluationOverflow(StrEnum):
    """What happens when an evaluation is due and too many are outstanding."""

    BACKPRESSURE = "backpressure"
    SKIP = "skip"


class EvaluationConfig(Section):
    """When and how held-out tasks are measured."""

    mode: EvaluationMode = EvaluationMode.SHARED
    """`shared`: on the engines of the run, which make no new training answers meanwhile; `dedicated`: on engines of
    their own, beside training, from a snapshot; `external`: by the program `command`, beside training."""
    engines: Positive = 1
    """dedicated: number of engine processes."""
    urls: tuple[str, ...] = ()
    """dedicated: use these running engines and start none; they must see the run folder."""
    command: tuple[str, ...] = ()
    """external: program and arguments; `{checkpoint}` becomes the snapshot's folder, `{version}` its number. Its last
    line of output is a JSON object of numbers, recorded as `eval/<name>`."""
    max_outstanding: Positive = 2
    """dedicated, external: evaluations that may be waiting or running."""
    overflow: EvaluationOverflow = EvaluationOverflow.BACKPRESSURE
    """dedicated, external: when that many are outstanding, wait for one (`backpressure`) or `skip` the new one
    (never the last of a run)."""
    keep_snapshots: NonNegative = 0
    """dedicated, external: measured snapshots that stay in the run folder (the newest ones)."""
    timeout_s: Seconds = 3600.0
    """dedicated, external: deadline of one evaluation; a late one is a skipped point."""

    every: NonNegative = 0
    """Evaluate after every n optimiser steps; 0: only at start and end."""
    at_start: bool = True
    """Evaluate the untrained policy first."""
    at_end: bool = True
    """Evaluate the final policy."""
    samples: Positive = 1
    """Answers per held-out prompt."""
    ks: tuple[Positive, ...] = ()
    """The k of `pass@k` and `mean@k`, each at most `samples`; default: 1 and `samples`."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Sampling of evaluation answers (greedy by default)."""

    @model_validator(mode="after")
    def _mode_is_complete(self) -> EvaluationConfig:
        if self.mode is EvaluationMode.EXTERNAL and not self.command:
            raise ValueError("command: mode external needs evaluation.command (the program that measures)")
        if self.command and self.mode is not EvaluationMode.EXTERNAL:
            raise ValueError("command: it is only used by mode external; set evaluation.mode, or leave it out")
        if self.command and not any("{checkpoint}" in part for part in self.command):
            raise ValueError("command: write {checkpoint} where the snapshot's folder belongs")
        if self.urls and self.mode is not EvaluationMode.DEDICATED:
            raise ValueError("urls: they are only used by mode dedicated; set evaluation.mode, or leave them out")
        if bad := [k for k in self.ks if k > self.samples]:
            raise ValueError(f"ks: {bad[0]} is more than evaluation.samples, {self.samples}")
        return self
