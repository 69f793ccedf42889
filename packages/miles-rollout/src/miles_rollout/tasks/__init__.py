"""Where prompts come from: resumable streams of tasks with ordinals that are never reused."""

from miles_rollout.tasks.gym import ReasoningGymTasks, Split
from miles_rollout.tasks.jsonl import JsonlTasks, LabelCheck, TaskFileError
from miles_rollout.tasks.stream import TaskSource, TaskStream

__all__ = ["JsonlTasks", "LabelCheck", "ReasoningGymTasks", "Split", "TaskFileError", "TaskSource", "TaskStream"]
