"""Group filters say whether a finished group can teach anything, and why not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from miles_contracts import FilterDecision, Group, GroupFilter, InvalidFieldError
from miles_rollout.imports import load_object

_KEEP = FilterDecision(keep=True)
_WARNINGS = 8
"""A streak is warned of each time another of so many parts of its bound is reached."""


class FilterStreak:
    """Counts groups that are filtered with none kept in between, so that a run without signal ends and says why.

    A policy that has all but solved its task filters tens of groups for each that it keeps: only a long streak
    means that nothing will come.

    Args:
        bound: length of the streak that ends the run.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._reasons: Counter[str] = Counter()
        self._rewards: list[float] = []

    @property
    def ended(self) -> bool:
        """Whether the bound is reached."""
        return self._reasons.total() >= self._bound

    @property
    def warns(self) -> bool:
        """Whether this length is worth a warning."""
        return self._reasons.total() % max(self._bound // _WARNINGS, 1) == 0

    def kept(self) -> None:
        """A group passed the filter."""
        self._reasons.clear()
        self._rewards.clear()

    def filtered(self, group: Group, reason: str) -> None:
        """A group did not."""
        self._reasons[reason or "no reason given"] += 1
        self._rewards += [t.reward for t in group if t.reward is not None]

    def __str__(self) -> str:
        counts = ", ".join(f"{reason}: {count}" for reason, count in self._reasons.most_common())
        text = f"the group filter dropped {self._reasons.total()} groups in a row and kept none ({counts})"
        if self._rewards:
            low, high = min(self._rewards), max(self._rewards)
            mean = math.fsum(self._rewards) / len(self._rewards)
            text += f"; their rewards: mean {mean:.3g}, from {low:.3g} to {high:.3g}"
        return text + (
            "; sample with a higher rollout.sampling.temperature, more answers a prompt (rollout.group_size), "
            "choose another rollout.filter, or a task with problems that are neither always nor never solved"
        )


def reward_variance(minimum: float = 1e-8) -> GroupFilter:
    """A filter that drops groups whose rewards are all equal: their advantages, and so their gradient, are zero.

    Args:
        minimum: largest difference between two rewards that still counts as equal.
    """
    if not minimum >= 0:
        raise InvalidFieldError("minimum", minimum, "use a value >= 0")

    def decide(group: Group) -> FilterDecision:
        rewards = [t.reward for t in group if t.reward is not None]
        if rewards and max(rewards) - min(rewards) > minimum:
            return _KEEP
        return FilterDecision(keep=False, reason="zero_reward_variance")

    return decide


def all_of(filters: Sequence[GroupFilter]) -> GroupFilter:
    """A filter that keeps what every one of `filters` keeps; the first refusal gives the reason."""

    def decide(group: Group) -> FilterDecision:
        for one in filters:
            decision = one(group)
            if not decision.keep:
                return decision
        return _KEEP

    return decide


def user_filter(path: str, *, field: str = "filter") -> GroupFilter:
    """The function `package.module:name`, which takes a Group and returns a FilterDecision or a bool.

    Args:
        path: where it is.
        field: what names it, for error messages.

    Raises:
        InvalidFieldError: it cannot be imported, or (when called) returns something else.
    """
    function = load_object(path, field=field)
    name = path.rpartition(":")[2]

    def decide(group: Group) -> FilterDecision:
        decision = function(group)
        if isinstance(decision, bool):
            return FilterDecision(keep=decision, reason="" if decision else name)
        if not isinstance(decision, FilterDecision):
            raise InvalidFieldError(f"result of {path}", decision, "return a FilterDecision or a bool")
        if not decision.keep and not decision.reason:
            return FilterDecision(keep=False, reason=name)
        return decision

    return decide
