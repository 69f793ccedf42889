"""Measuring a weight version on held-out tasks: on the shared engines, on dedicated ones, or by any program."""

from miles_rollout.evaluation.dedicated import DedicatedEvaluator
from miles_rollout.evaluation.estimators import mean_at_k, pass_at_k
from miles_rollout.evaluation.external import ExternalEvaluator
from miles_rollout.evaluation.heldout import HeldOut, evaluate
from miles_rollout.evaluation.points import EvalPoint, EvaluationSkippedError
from miles_rollout.evaluation.shared import SharedEvaluation
from miles_rollout.evaluation.snapshots import Overflow, SnapshotEvaluation

__all__ = [
    "DedicatedEvaluator",
    "EvalPoint",
    "EvaluationSkippedError",
    "ExternalEvaluator",
    "HeldOut",
    "Overflow",
    "SharedEvaluation",
    "SnapshotEvaluation",
    "evaluate",
    "mean_at_k",
    "pass_at_k",
]
