"""Rewards and a filter in every form that a user may write them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles_contracts import Group, Task, Trajectory


def ranks(task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    """The rank of each answer's length among its siblings'; ties by position."""
    order = sorted(range(len(trajectories)), key=lambda i: (trajectories[i].num_sampled, i))
    return [float(order.index(i)) for i in range(len(trajectories))]


def even(group: Group) -> bool:
    """Keeps the even prompts."""
    return group.prompt_index % 2 == 0


def sometimes(task: Task, response: str) -> float:
    """Fails for about a third of all answers, decided by the answer."""
    if sum(response.encode()) % 3 == 0:
        raise RuntimeError("the judge was not sure")
    return float(len(response))


def lengths(tasks: Sequence[Task], responses: Sequence[str]) -> list[float]:
    """Scores a batch."""
    assert len(tasks) == len(responses)
    return [float(len(response)) for response in responses]


async def uneven(task: Task, response: str) -> float:
    """Every fifth prompt always fails; odd prompts are scored at once, and even ones are overtaken."""
    if task.prompt_index % 5 == 2:
        raise RuntimeError("the judge cannot tell")
    await asyncio.sleep(0.0 if task.prompt_index % 2 else 0.2)
    return float(len(response))
