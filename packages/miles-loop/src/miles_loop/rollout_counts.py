"""What all rollout workers did, added up as if one router and one session server had done it."""

from __future__ import annotations

from miles_loop import rollout_link as link
from miles_rollout.router.counts import RouterCounts


class WorkerCounts:
    """Adds reports up. `restarts` and `reissued` are counted by whoever restarts workers and asks again."""

    def __init__(self) -> None:
        self.restarts = 0
        self.reissued = 0
        self._told_of = (0, 0)
        self._routed = RouterCounts()
        self._now: dict[str, tuple[int, int]] = {}
        self._counted: dict[link.Purpose, dict[str, float]] = {}

    def add(self, name: str, told: link.Told) -> None:
        """One report of the worker of this name."""
        self._routed = self._routed.plus(told.counts)
        self._now[name] = (told.serving, told.outstanding_tokens)
        for purpose, counted in told.counted.items():
            sums = self._counted.setdefault(purpose, {})
            for key, value in counted.items():
                sums[key] = sums.get(key, 0.0) + value

    def forget(self, name: str) -> None:
        """This worker is gone: what it was doing is no longer under way."""
        self._now.pop(name, None)

    def take_counted(self, purpose: link.Purpose) -> dict[str, float]:
        """Counted since the last call by the making of answers; what was ever counted is named, as 0."""
        counted = self._counted.get(purpose, {})
        self._counted[purpose] = dict.fromkeys(counted, 0.0)
        return counted

    def take_routed(self) -> dict[str, float]:
        """Routed of training since the last call, under the names of a single router's metrics.

        Engines that serve are those of the worker that sees the fewest.
        """
        routed, self._routed = self._routed, RouterCounts()
        told, self._told_of = self._told_of, (self.restarts, self.reissued)
        now = {}
        if self._now:
            now["router/engines_serving"] = float(min(serving for serving, _ in self._now.values()))
            now["router/outstanding_tokens"] = float(sum(tokens for _, tokens in self._now.values()))
        return (
            now
            | routed.metrics()
            | {
                "router/rollout_worker_restarts": float(self.restarts - told[0]),
                "router/reissued_answers": float(self.reissued - told[1]),
            }
        )
