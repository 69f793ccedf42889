"""What becomes of groups that are not trained; a fault is told once, not once a prompt, and again as it grows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from miles_rollout.buffer import Dropped
from miles_rollout.ledger import Fate
from miles_rollout.metrics import PREFIX

OTHER: Final = "(other reasons)"
_MOST_KINDS = 32
_LONGEST = 300
_PLACE = re.compile(r"\((?P<place>[^()]*:\d+)\)$")


def _kind(reason: str) -> str:
    """The same for two reasons that are one fault: what was raised and where, whatever values it names.

    Without a place the text counts, its numbers apart.
    """
    place = _PLACE.search(reason)
    if place is not None:
        return f"{reason.partition(':')[0]} {place['place']}"
    return re.sub(r"\d+", "#", reason)[:_LONGEST]


def _shortened(reason: str) -> str:
    """At most `_LONGEST` characters; the place at the end stays."""
    if len(reason) <= _LONGEST:
        return reason
    place = _PLACE.search(reason)
    end = f"... {place[0]}"[-_LONGEST:] if place is not None else "..."
    return reason[: _LONGEST - len(end)] + end


class Faults:
    """Counts failures by what is at fault; the reason of the first of each kind stands for all of them."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def note(self, reason: str) -> tuple[str, int]:
        """Count one; returns the reason that its kind is known by, and how many there were."""
        kind = _kind(reason)
        if kind not in self._first:
            known = len(self._first) < _MOST_KINDS
            kind = kind if known else OTHER
            self._first.setdefault(kind, _shortened(reason) if known else OTHER)
        self._counts[kind] += 1
        return self._first[kind], self._counts[kind]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there were of each, by the reason of the first."""
        counts: Counter[str] = Counter()
        for kind, count in self._counts.items():
            counts[self._first[kind]] += count
        return counts


class Fates:
    """The prompts of groups that were not trained.

    Args:
        warn: told, in words, what people should know.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._window: Counter[Fate] = Counter()
        self._failed = Faults()
        self._given_up = Faults()

    @property
    def failures(self) -> Mapping[str, int]:
        """Failed groups since the start, by the reason of the first of each kind."""
        return self._failed.counts

    def failed(self, dropped: Dropped) -> None:
        """A group failed, whatever becomes of its prompt."""
        reason, count = self._failed.note(dropped.reason)
        if count == 1:
            self._warn(f"a group failed: {reason} (groups that fail so are counted from now on, not named)")
        elif _is_power_of_ten(count):
            self._warn(f"{count} groups have failed by now: {reason}")

    def settle(self, fate: Fate, dropped: Dropped) -> None:
        """Count what became of a prompt; the first that is given up for a reason is also named."""
        self._window[fate] += 1
        if fate is not Fate.GIVEN_UP:
            return
        _, count = self._given_up.note(dropped.reason)
        if count == 1:
            index, attempt = dropped.group.prompt_index, dropped.group.attempt
            self._warn(f"prompt {index} is given up after attempt {attempt}: {dropped.reason}")
        elif _is_power_of_ten(count):
            self._warn(f"{count} prompts are given up by now: {dropped.reason}")

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        window, self._window = self._window, Counter()
        return {
            PREFIX + "retries": float(window[Fate.RETRIED]),
            PREFIX + "given_up_prompts": float(window[Fate.GIVEN_UP]),
            PREFIX + "dropped_prompts": float(window[Fate.DROPPED]),
        }


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"
