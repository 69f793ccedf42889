"""How answers of a run are scored, from the names and addresses that the configuration holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from miles_contracts import Generate, InvalidFieldError, Reward, Task, Trajectory
from miles_loop.config import RewardScope, TaskConfig
from miles_loop.names import nearest
from miles_rollout.episodes import GroupReward
from miles_rollout.imports import load_object
from miles_rollout.rewards import (
    BatchReward,
    CodeReward,
    ExactMatch,
    MathMatch,
    NumericMatch,
    ReasoningGymReward,
    RemoteReward,
    Sandbox,
    UserReward,
    exact_label,
    numeric_label,
)
from miles_rollout.tasks import LabelCheck

_log = logging.getLogger(__name__)
_BUILTIN: dict[str, Callable[[], Reward]] = {
    "exact": ExactMatch,
    "numeric": NumericMatch,
    "maths": MathMatch,
    "code": lambda: CodeReward(Sandbox()),
    "verifier": ReasoningGymReward,
}


_LABELS: dict[str, LabelCheck] = {
    "exact": exact_label,
    "numeric": numeric_label,
    "maths": exact_label,
}


def names_function(reward: str) -> bool:
    """Whether a reward is named as a function of the user, `pkg.mod:fn`."""
    return ":" in reward and not _is_address(reward)


def _is_address(reward: str) -> bool:
    return reward.startswith(("http://", "https://"))


def label_check(config: TaskConfig, reward: str) -> LabelCheck | None:
    """What the built-in `reward` asks of a label, as why it cannot be used; None where labels are not its business.

    An agent may give its own rewards, so its tasks need no labels.
    """
    if config.agent is not None or reward not in _LABELS:
        return None
    check = _LABELS[reward]

    def problem(label: Any) -> str | None:
        found = check(label)
        return None if found is None else f"{found} (task reward {reward!r} compares answers with it)"

    return problem


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores each answer, or each group of answers: exactly one of the two is there."""

    answer: Reward | None = None
    group: GroupReward | None = None

    async def close(self) -> None:
        """End connections and child processes."""
        if isinstance(self.answer, RemoteReward | MathMatch):
            await self.answer.close()


def check_reward(name: str, field: str) -> None:
    """Refuse what names no reward.

    Raises:
        InvalidFieldError: with the nearest name.
    """
    if ":" in name or name in _BUILTIN:
        return
    known = ", ".join(_BUILTIN)
    remedy = f"{nearest(name, _BUILTIN)}use {known}, the address of a reward service, or a function as pkg.mod:fn"
    raise InvalidFieldError(field, name, remedy)


ServiceFactory = Callable[[str], RemoteReward]
"""From the address of a reward service."""


def make_scoring(name: str, scope: RewardScope, *, field: str, service: ServiceFactory = RemoteReward) -> Scoring:
    """From a built-in name, an http(s):// address, or the function `pkg.mod:fn`.

    Args:
        name: which.
        scope: how a function is called.
        field: what names it, for error messages.
        service: how an address is asked.

    Raises:
        InvalidFieldError: unknown name, a function that cannot be imported or called, or a scope that does not fit.
    """
    if _is_address(name) or name in _BUILTIN:
        if scope is not RewardScope.ANSWER:
            raise InvalidFieldError("task.reward_scope", scope.value, f"{name} scores single answers; leave it out")
        return Scoring(_BUILTIN[name]() if name in _BUILTIN else service(name))
    check_reward(name, field)
    match scope:
        case RewardScope.ANSWER:
            return Scoring(UserReward(name))
        case RewardScope.BATCH:
            return Scoring(BatchReward(load_object(name, field=field)))
        case RewardScope.GROUP:
            return Scoring(group=load_object(name, field=field))


def task_scoring(config: TaskConfig, reward_timeout_s: float) -> tuple[Scoring, Scoring]:
    """Scoring of training answers and of held-out answers.

    Args:
        config: of the task.
        reward_timeout_s: seconds for scoring one answer, with all requests to a service.

    Raises:
        InvalidFieldError: as `make_scoring`.
    """
    tries = 1 + config.reward_retries
    request_s = config.reward_request_timeout_s or reward_timeout_s / tries
    service = partial(RemoteReward, timeout_s=request_s, retries=config.reward_retries)
    training = make_scoring(config.reward, config.reward_scope, field="task.reward", service=service)
    if config.eval_reward is None:
        return training, training
    scope = config.reward_scope if names_function(config.eval_reward) else RewardScope.ANSWER
    return training, make_scoring(config.eval_reward, scope, field="task.eval_reward", service=service)


@runtime_checkable
class Counting(Protocol):
    """A `Generate` that counts what happens in it (an agent's audit, say)."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics by name, of everything since the last call."""
        ...


class CountingService:
    """Makes answers with `generate`, and tells what their reward service counted (see `RemoteReward.take_counts`).

    Why answers got no reward is logged, one of them each time.
    """

    def __init__(self, generate: Generate, service: RemoteReward) -> None:
        self._generate = generate
        self._service = service

    async def __call__(self, task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        """One answer."""
        return await self._generate(task, member, attempt)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call, with what `generate` itself counted."""
        own = self._generate.take_metrics() if isinstance(self._generate, Counting) else {}
        counts = self._service.take_counts()
        if counts["failed"]:
            _log.warning("%d answers got no reward, the last: %s", counts["failed"], self._service.last_failure)
        return own | {f"rollout/reward_service/{name}": float(count) for name, count in counts.items()}
