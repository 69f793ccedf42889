"""Scoring ends in a finite reward or in a reason, whatever the reward function does."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

import msgspec

from miles_contracts import Reward, Task
from miles_rollout.raised import describe_raised


class RewardOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What scoring one response gave: a finite `value`, or None with the `error` that explains it."""

    value: float | None
    error: str | None = None


async def score(reward: Reward, task: Task, response: str, *, timeout_s: float | None = None) -> RewardOutcome:
    """Score `response`; never raises for what the reward does wrong.

    Args:
        reward: a plain or asynchronous reward. A plain one runs on the event loop, so it has to be quick;
            `UserReward` moves foreign code off the loop.
        task: the task that was answered.
        response: the decoded answer.
        timeout_s: seconds an asynchronous reward may take; None waits for ever.
    """
    try:
        async with asyncio.timeout(timeout_s) as timer:
            result: Any = reward(task, response)
            if inspect.isawaitable(result):
                result = await result
    except TimeoutError as error:
        reason = f"gave no answer within {timeout_s:g} s" if timer.expired() else f"raised {describe_raised(error)}"
        return RewardOutcome(value=None, error=f"reward {reason}")
    except Exception as error:  # noqa: BLE001 - a foreign function may raise anything; it fails one trajectory
        return RewardOutcome(value=None, error=f"reward raised {describe_raised(error)}")
    return check_value(result)


def check_value(result: Any) -> RewardOutcome:
    """Accept a finite real number (bool included), refuse everything else with a reason."""
    if hasattr(result, "item") and getattr(result, "shape", None) == ():
        result = result.item()  # numpy scalars and 0-d arrays
    if not isinstance(result, (bool, int, float)):
        return RewardOutcome(value=None, error=f"reward returned {type(result).__name__}, expected a number")
    try:
        value = float(result)
    except OverflowError:
        return RewardOutcome(value=None, error="reward returned an integer that no float can hold")
    if not math.isfinite(value):
        return RewardOutcome(value=None, error=f"reward returned {value}, expected a finite number")
    return RewardOutcome(value=value)
