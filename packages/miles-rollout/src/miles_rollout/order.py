"""In which order finished groups are trained."""

from __future__ import annotations

from enum import StrEnum


class TrainingOrder(StrEnum):
    """Which of the finished groups the trainer takes first."""

    ARRIVAL = "arrival"
    """Those of the oldest weights, then those that were finished first: nobody waits for a slow one."""
    PROMPT = "prompt"
    """Strictly by position in the stream of prompts: the same sequence in every run, at the cost of waiting for a
    slow one. A group that is dropped for good is passed over; one that is tried again keeps its position."""
