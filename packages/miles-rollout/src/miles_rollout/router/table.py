"""The router's table: sessions stick to the engine that has their prefix; new ones go where least is outstanding.

A pure state machine, without sockets or tasks. An engine is either *serving* or *quarantined* with a reason; a
session on a quarantined engine is placed again at its next turn.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

from miles_contracts import InvalidFieldError


class Placement(StrEnum):
    """How a turn finds its engine."""

    AFFINITY = "affinity"
    """The session's engine; a new session goes to the one with the fewest outstanding tokens."""
    RANDOM = "random"
    """Any serving engine each turn; only useful to measure what affinity is worth."""


class EngineSlot:
    """What the table knows of one engine. `quarantine` is None while it serves, else the reason."""

    __slots__ = ("cached_tokens", "outstanding", "prompt_tokens", "quarantine", "sessions", "turns")

    def __init__(self) -> None:
        self.quarantine: str | None = None
        self.outstanding = 0
        self.sessions = 0
        self.turns = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0


class RouterTable:
    """Places turns on engines.

    Args:
        engines: names, unique.
        placement: how.
        max_sessions: sessions remembered; the one unused for longest is forgotten (it is only placed anew).
        seed: of random placement.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        placement: Placement = Placement.AFFINITY,
        max_sessions: int = 100_000,
        seed: int = 0,
    ) -> None:
        if not engines or len(set(engines)) != len(engines):
            raise InvalidFieldError("engines", list(engines), "give at least one engine, each once")
        if max_sessions < 1:
            raise InvalidFieldError("max_sessions", max_sessions, "use a value >= 1")
        self._slots = {name: EngineSlot() for name in engines}
        self._placement = Placement(placement)
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._random = random.Random(seed)

    @property
    def slots(self) -> dict[str, EngineSlot]:
        """All engines, in the order they were given."""
        return dict(self._slots)

    @property
    def serving(self) -> list[str]:
        """Engines that take turns."""
        return [name for name, slot in self._slots.items() if slot.quarantine is None]

    def engine_of(self, key: str) -> str | None:
        """The engine a session sticks to, None when it has none."""
        return self._sessions.get(key)

    def add(self, name: str, *, quarantine: str | None) -> None:
        """A new engine, quarantined for `quarantine` unless that is None."""
        if name in self._slots:
            raise InvalidFieldError("engine", name, "it is already in the table")
        self._slots[name] = EngineSlot()
        self._slots[name].quarantine = quarantine

    def place(self, key: str, tokens: int, *, avoid: str | None = None) -> str | None:
        """The engine for the next turn of session `key`, or None when none serves.

        Args:
            key: the session.
            tokens: prompt plus most new tokens of the turn; outstanding until `done`.
            avoid: an engine that just failed this turn; used only when no other serves.
        """
        serving = self.serving
        if not serving:
            return None
        candidates = [name for name in serving if name != avoid] or serving
        home = self._sessions.get(key)
        if self._placement is Placement.RANDOM:
            chosen = self._random.choice(candidates)
        elif home in candidates:
            chosen = home
        else:
            chosen = min(candidates, key=lambda n: (self._slots[n].outstanding, self._slots[n].sessions))
        if chosen != home:
            self.forget(key)
            self._sessions[key] = chosen
            self._slots[chosen].sessions += 1
        self._sessions.move_to_end(key)
        if len(self._sessions) > self._max_sessions:
            self.forget(next(iter(self._sessions)))
        self._slots[chosen].outstanding += tokens
        return chosen

    def done(self, name: str, tokens: int) -> None:
        """A turn of `tokens` on engine `name` ended, in whatever way."""
        slot = self._slots[name]
        if tokens > slot.outstanding:
            raise InvalidFieldError("tokens", tokens, f"only {slot.outstanding} are outstanding on {name}")
        slot.outstanding -= tokens

    def answered(self, name: str, *, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Count an answer for the hit rates; a turn whose engine did not say what was cached counts for none."""
        slot = self._slots[name]
        slot.turns += 1
        if cached_tokens is not None:
            slot.prompt_tokens += prompt_tokens
            slot.cached_tokens += cached_tokens

    def forget(self, key: str) -> None:
        """The session is over."""
        name = self._sessions.pop(key, None)
        if name is not None:
            self._slots[name].sessions -= 1

    def quarantine(self, name: str, reason: str) -> bool:
        """Take an engine out of service; True when it served until now."""
        slot = self._slots[name]
        served = slot.quarantine is None
        slot.quarantine = reason
        return served

    def admit(self, name: str) -> bool:
        """Put an engine (back) into service; True when it was quarantined until now."""
        slot = self._slots[name]
        was = slot.quarantine is not None
        slot.quarantine = None
        return was
