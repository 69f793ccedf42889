"""Which engine serves which session, and what happens when one dies."""

from miles_rollout.router.router import Router, RouterConfig
from miles_rollout.router.table import Placement, RouterTable

__all__ = ["Placement", "Router", "RouterConfig", "RouterTable"]
