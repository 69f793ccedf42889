"""A step that would make the weights non-finite stops with a report and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_contracts import MilesError, TrajectoryIdentity

_SHOWN = 3


@dataclass(frozen=True)
class NonFiniteReport:
    """Where the first non-finite value of a step was found.

    Attributes:
        what: `logprob`, `reference_logprob`, `loss` or `gradient`.
        count: how many values were not finite.
        value: the first of them, as text (`nan`, `inf`, `-inf`).
        identity: trajectory of that value, None for a gradient.
        token: index into the trajectory's `token_ids`, None for a gradient.
        parameters: canonical names of all parameters with a non-finite gradient.
        candidates: for a gradient, the trajectories that were in the step, as text.
    """

    what: str
    count: int
    value: str
    identity: TrajectoryIdentity | None = None
    token: int | None = None
    parameters: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.count} non-finite {self.what} value(s), the first is {self.value}"
        if self.identity is not None:
            text += f" at {describe(self.identity)}, token {self.token}"
        if self.parameters:
            text += f" in {first_names(self.parameters)}"
        if self.candidates:
            text += f"; trajectories of the step: {first_names(self.candidates)}"
        return text


class NonFiniteError(MilesError, ArithmeticError):
    """NaN or infinity in a step; model, optimiser and version are as before it.

    Attributes:
        report: where it was found.
    """

    def __init__(self, report: NonFiniteReport) -> None:
        super().__init__(f"step refused: {report}; weights and optimiser are unchanged")
        self.report = report


class CheckpointError(MilesError):
    """A checkpoint is incomplete, corrupted or belongs to another model; nothing was loaded."""


class RankFailedError(MilesError):
    """Another rank of the trainer group failed; this one, and so the group, has changed nothing."""


class RankLostError(MilesError):
    """A rank of the trainer group is missing: what it did last is not known, so the group is of no more use."""


class RankGoneError(RankLostError):
    """It closed its connections: it has ended."""


class RankLateError(RankLostError):
    """It is not heard of in time: it hangs, or is out of reach."""


class RanksDivergedError(MilesError):
    """The ranks of a trainer group hold different weights: none of them can be trusted."""


def first_names(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def describe(identity: TrajectoryIdentity) -> str:
    """Short text that names one trajectory."""
    return f"prompt {identity.prompt_index} member {identity.member} leaf {identity.leaf} attempt {identity.attempt}"
