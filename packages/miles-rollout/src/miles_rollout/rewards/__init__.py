"""Rewards are finite numbers or failures with a reason, never a quiet zero."""

from miles_rollout.rewards.base import RewardOutcome, score
from miles_rollout.rewards.batch import BatchReward
from miles_rollout.rewards.code import CodeReward
from miles_rollout.rewards.gym import ReasoningGymReward
from miles_rollout.rewards.matching import ExactMatch, NumericMatch, exact_label, extract_number, numeric_label
from miles_rollout.rewards.maths import MathMatch
from miles_rollout.rewards.remote import RemoteReward
from miles_rollout.rewards.sandbox import Isolation, Limits, Sandbox, SandboxError
from miles_rollout.rewards.user import UserReward

__all__ = [
    "BatchReward",
    "CodeReward",
    "ExactMatch",
    "Isolation",
    "Limits",
    "MathMatch",
    "NumericMatch",
    "ReasoningGymReward",
    "RemoteReward",
    "RewardOutcome",
    "Sandbox",
    "SandboxError",
    "UserReward",
    "exact_label",
    "extract_number",
    "numeric_label",
    "score",
]
