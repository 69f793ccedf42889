"""What all adapters raise when an episode gives no reward."""

from __future__ import annotations

from miles_contracts import MilesError


class EnvironmentFailedError(MilesError):
    """An episode of the environment failed; its trajectory is failed, and never a reward of zero."""
