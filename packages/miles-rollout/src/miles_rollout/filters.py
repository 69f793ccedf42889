"""Group filters say whether a finished group can teach anything, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from miles_contracts import FilterDecision, Group, GroupFilter, InvalidFieldError
from miles_rollout.imports import load_object

_KEEP = FilterDecision(keep=True)


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
