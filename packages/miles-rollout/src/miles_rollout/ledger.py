"""The ledger knows where every prompt is, so that none is lost and none is trained twice.

    source -> in flight -> (buffer) -> trained
                ^    |
                |    v
              waiting for retry  -> given up (budget spent; reported)

Attempts of a prompt are numbered from 0 and never reused. The replacement of a single member takes the numbers
between two attempts of its group (`stride` apart), so that a seed derived from (prompt, member, attempt) is drawn
once and does not depend on which member failed first.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from miles_contracts import InvalidFieldError
from miles_rollout.order import TrainingOrder


class UnusedPolicy(StrEnum):
    """What happens to the prompt of a failed or stale group."""

    DROP = "drop"
    RETRY = "retry"


class Fate(StrEnum):
    """What becomes of the prompt of a group that will not be trained."""

    DROPPED = "dropped"
    RETRIED = "retried"
    GIVEN_UP = "given_up"
    """Its budget of retries is spent."""


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to generate: `attempt` is the number of this try, after `retries` tries of the whole group."""

    prompt_index: int
    attempt: int = 0
    retries: int = 0


class Ledger:
    """Which prompts are in flight or wait for a retry, and how often each was tried. A pure state machine.

    Args:
        on_failure: for prompts of failed groups.
        on_stale: for prompts of stale groups.
        max_retries: retries per prompt before it is given up.
        stride: attempt numbers that one try of a group may use, 1 plus the replacements of a member.
        order: of training. By prompt a waiting prompt is issued before all later ones, else first come, first served.
    """

    def __init__(
        self,
        *,
        on_failure: UnusedPolicy = UnusedPolicy.DROP,
        on_stale: UnusedPolicy = UnusedPolicy.DROP,
        max_retries: int = 3,
        stride: int = 1,
        order: TrainingOrder = TrainingOrder.ARRIVAL,
    ) -> None:
        if max_retries < 0:
            raise InvalidFieldError("max_retries", max_retries, "use a value >= 0")
        if stride < 1:
            raise InvalidFieldError("stride", stride, "use a value >= 1")
        self._stride = stride
        self._on_failure = UnusedPolicy(on_failure)
        self._on_stale = UnusedPolicy(on_stale)
        self._max_retries = max_retries
        self._order = TrainingOrder(order)
        self._waiting: list[Issue] = []
        self._in_flight: dict[int, Issue] = {}
        self._kept: dict[int, Issue] = {}
        self._prompts: list[int] = []
        """All prompts above, in increasing order."""

    @property
    def order(self) -> TrainingOrder:
        """Order of training."""
        return self._order

    @property
    def stride(self) -> int:
        """Attempt numbers between two tries of a group."""
        return self._stride

    @property
    def in_flight(self) -> tuple[Issue, ...]:
        """What is being generated, in the order it was begun."""
        return tuple(self._in_flight.values())

    @property
    def waiting(self) -> tuple[Issue, ...]:
        """What will be issued before new prompts, in order."""
        return tuple(self._waiting)

    @property
    def next_waiting(self) -> Issue | None:
        """What `begin_waiting` would take."""
        return self._waiting[0] if self._waiting else None

    @property
    def first_unfinished(self) -> int | None:
        """The lowest prompt that is in flight or waits for a retry, None when there is none."""
        return next((prompt for prompt in self._prompts if prompt not in self._kept), None)

    def count_before(self, prompt_index: int | None) -> int:
        """Prompts that are not done with and come before this one in the stream; None: all of them."""
        return len(self._prompts) if prompt_index is None else bisect.bisect_left(self._prompts, prompt_index)

    def prompt_at(self, place: int) -> int:
        """The prompt with `place` others before it."""
        return self._prompts[place]

    def begin_waiting(self) -> Issue | None:
        """Take the first waiting prompt into flight, None when there is none."""
        if not self._waiting:
            return None
        issue = self._waiting.pop(0)
        self._in_flight[issue.prompt_index] = issue
        return issue

    def begin_fresh(self, prompt_index: int) -> Issue:
        """Take a prompt of the source into flight for the first time."""
        place = self.count_before(prompt_index)
        if self._prompts[place : place + 1] == [prompt_index]:
            raise InvalidFieldError("prompt_index", prompt_index, "the source gave an ordinal twice")
        issue = Issue(prompt_index=prompt_index)
        self._prompts.insert(place, prompt_index)
        self._in_flight[prompt_index] = issue
        return issue

    def kept(self, prompt_index: int) -> None:
        """The group passed on to the buffer."""
        self._kept[prompt_index] = self._in_flight.pop(prompt_index)

    def finished(self, prompt_index: int) -> None:
        """The prompt is done with: trained, or its group filtered."""
        self._in_flight.pop(prompt_index, None)
        self._kept.pop(prompt_index, None)
        self._forget(prompt_index)

    def failed(self, prompt_index: int) -> Fate:
        """The group in flight failed: retry, drop or give up its prompt."""
        return self._unused(self._in_flight.pop(prompt_index), self._on_failure)

    def stale(self, prompt_index: int) -> Fate:
        """The group in the buffer grew too old: retry, drop or give up its prompt."""
        return self._unused(self._kept.pop(prompt_index), self._on_stale)

    def _unused(self, issue: Issue, policy: UnusedPolicy) -> Fate:
        if policy is UnusedPolicy.DROP or issue.retries >= self._max_retries:
            self._forget(issue.prompt_index)
            return Fate.DROPPED if policy is UnusedPolicy.DROP else Fate.GIVEN_UP
        attempt, retries = issue.attempt + self._stride, issue.retries + 1
        self._wait(Issue(prompt_index=issue.prompt_index, attempt=attempt, retries=retries))
        return Fate.RETRIED

    def state(self) -> tuple[tuple[Issue, ...], tuple[Issue, ...]]:
        """(to issue again, kept in the buffer). What is in flight comes first, with the attempt it is at, so
        that a resumed run samples the same tokens."""
        again = sorted(self._in_flight.values(), key=lambda i: i.prompt_index)
        return (*again, *self._waiting), tuple(self._kept.values())

    def restore(self, again: Iterable[Issue], kept: Iterable[Issue]) -> None:
        """Start from a `state`; only on a ledger that was not used yet."""
        if self._in_flight or self._kept or self._waiting:
            raise InvalidFieldError("ledger", len(self._in_flight), "restore before the worker starts")
        for issue in again:
            self._wait(issue)
        self._kept.update({i.prompt_index: i for i in kept})
        self._prompts = sorted([*(i.prompt_index for i in self._waiting), *self._kept])

    def _wait(self, issue: Issue) -> None:
        if self._order is TrainingOrder.PROMPT:
            bisect.insort(self._waiting, issue, key=lambda i: i.prompt_index)
        else:
            self._waiting.append(issue)

    def _forget(self, prompt_index: int) -> None:
        place = self.count_before(prompt_index)
        if self._prompts[place : place + 1] == [prompt_index]:
            del self._prompts[place]
