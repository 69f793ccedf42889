"""A point of the evaluation curve: figures of one weight version, or the reason why there are none."""

from __future__ import annotations

import msgspec

from miles_contracts import MilesError


class EvaluationSkippedError(MilesError):
    """An evaluation could not be done; the run goes on without this point.

    Attributes:
        kind: short name for the metric `eval/skipped_<kind>`.
        reason: what happened.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"evaluation skipped ({kind}): {reason}")
        self.kind = kind
        self.reason = reason


class EvalPoint(msgspec.Struct, frozen=True, kw_only=True, tag="eval_point"):
    """What one evaluation came to.

    Attributes:
        version: the weight version that was to be measured.
        metrics: under their full names `eval/...`; of a skipped point only `eval/skipped_<kind>`.
        skipped: why there are no figures, None when there are.
    """

    version: int
    metrics: dict[str, float]
    skipped: str | None = None

    @classmethod
    def skip(cls, version: int, kind: str, reason: str) -> EvalPoint:
        """A point without figures."""
        return cls(version=version, metrics={f"eval/skipped_{kind}": 1.0}, skipped=f"{kind}: {reason}")

    def with_metrics(self, **metrics: float) -> EvalPoint:
        """The point with more figures, named without the prefix `eval/`."""
        return msgspec.structs.replace(self, metrics=self.metrics | {f"eval/{k}": v for k, v in metrics.items()})
