"""The fleet as its routers have to see it: what a rollout worker is told that comes later than the others.

A pure state machine: a worker that is given `state` and then every later word has what a worker has that heard all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its name, where it answers, and why it is out of service (None while it serves)."""

    url: str
    address: str
    quarantine: str | None = None


class FleetState(msgspec.Struct, frozen=True, kw_only=True, tag="fleet_state"):
    """All engines in order, the version they must serve (None before the first update) and updates under way."""

    engines: tuple[EngineState, ...]
    version: int | None
    updates: int


class FleetView:
    """Takes the fleet's words one after the other.

    Args:
        engines: name and address of each, in order.
    """

    def __init__(self, engines: Sequence[tuple[str, str]]) -> None:
        self._engines = {url: EngineState(url=url, address=address) for url, address in engines}
        self._version: int | None = None
        self._updates = 0

    @property
    def state(self) -> FleetState:
        """As of now."""
        return FleetState(engines=tuple(self._engines.values()), version=self._version, updates=self._updates)

    def set_version(self, version: int) -> None:
        """Engines must serve it."""
        self._version = version

    def update_begins(self) -> None:
        """Weights change."""
        self._updates += 1

    def update_ends(self) -> None:
        """They do no longer."""
        assert self._updates > 0
        self._updates -= 1

    def quarantine(self, url: str, reason: str) -> None:
        """Out of service."""
        self._engines[url] = msgspec.structs.replace(self._engines[url], quarantine=reason)

    def readmit(self, url: str, address: str) -> None:
        """It may serve, there."""
        self._engines[url] = EngineState(url=url, address=address)
