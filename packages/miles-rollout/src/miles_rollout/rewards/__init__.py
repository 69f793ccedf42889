"""Rewards are finite numbers or failures with a reason, never a quiet zero."""

from miles_rollout.rewards.base import RewardOutcome, score
from miles_rollout.rewards.gym import ReasoningGymReward
from miles_rollout.rewards.matching import ExactMatch, NumericMatch, extract_number
from miles_rollout.rewards.user import UserReward

__all__ = [
    "ExactMatch",
    "NumericMatch",
    "ReasoningGymReward",
    "RewardOutcome",
    "UserReward",
    "extract_number",
    "score",
]
