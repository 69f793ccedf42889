"""Built-in ways to make the trajectories of one member of a group."""

from miles_rollout.generate.single_turn import PromptTooLongError, check_prompt_lengths, single_turn
from miles_rollout.generate.trajectories import derive_seed, failed_trajectory

__all__ = ["PromptTooLongError", "check_prompt_lengths", "derive_seed", "failed_trajectory", "single_turn"]
