"""Figures of the asynchronous pipeline; every one says over which groups it is taken."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from miles_contracts import Group

PREFIX = "rollout/fully_async/"
FILTER_PREFIX = "rollout/dynamic_filter/drop_"
BIAS_PREFIX = "rollout/bias/"
"""Sides of the bias report. Answers that were trained; answers that were dropped, of every attempt at a prompt; and
answers of the last attempt at prompts that were left out for good (filtered, dropped or given up)."""
VERSION_PREFIX = "rollout/weight_version/"
"""Oldest version of each consumed trajectory, and the share of those that more than one version sampled."""


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of a sequence that is not empty, independent of its order to the last bit."""
    return math.fsum(values) / len(values)


class _Side:
    """Lengths and rewards of the trajectories on one side of the bias report."""

    def __init__(self) -> None:
        self.groups = 0
        self.lengths: list[int] = []
        self.rewards: list[float] = []

    def add(self, group: Group) -> None:
        self.groups += 1
        self.lengths += [t.num_sampled for t in group]
        self.rewards += [t.reward for t in group if t.reward is not None]


class BufferWindow:
    """What the buffer counted since the last report."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()
        self._filtered: Counter[str] = Counter()
        self._staleness: list[int] = []
        self._waiting_staleness: list[int] = []
        self._unknown_consumed = 0
        self._versions: list[tuple[int, int]] = []
        self._generation_span: list[int] = []
        self._queue_wait: list[int] = []
        self._publish_lag: list[int] = []
        self._generation_s: list[float] = []
        self._queue_s: list[float] = []
        self._wasted_tokens = 0
        self._trained = _Side()
        self._dropped = _Side()
        self._left_out = _Side()

    def leave_out(self, group: Group) -> None:
        """Count a prompt that will not be trained; `group` is the last attempt at it."""
        self._left_out.add(group)

    def drop(self, verdict: str, reason: str, group: Group) -> None:
        """Count a group that will not be trained; its prompt may be tried again."""
        self._drops[verdict] += 1
        if verdict == "filtered":
            self._filtered[reason] += 1
        self._wasted_tokens += sum(t.num_sampled for t in group)
        self._dropped.add(group)

    def consume(
        self, group: Group, generation_s: float, queue_s: float, train_version: int, engine_version: int | None
    ) -> None:
        """Count a group that goes to the trainer. Its staleness is the sum of three parts: versions that passed
        while it was generated, while it waited, and between the engines' version and the trainer's."""
        self._generation_s.append(generation_s)
        self._queue_s.append(queue_s)
        self._trained.add(group)
        for t in group:
            if t.oldest_version is not None and t.newest_version is not None:
                self._versions.append((t.oldest_version, t.newest_version))
        oldest = group.oldest_version
        if oldest is None:
            self._unknown_consumed += 1
            return
        newest = max(t.newest_version for t in group if t.newest_version is not None)
        self._staleness.append(train_version - oldest)
        self._generation_span.append(newest - oldest)
        if engine_version is not None:
            self._queue_wait.append(engine_version - newest)
            self._publish_lag.append(train_version - engine_version)

    def observe_waiting(self, groups: Sequence[Group], train_version: int) -> None:
        """Note the staleness of what is left in the buffer after a batch was collected."""
        known = [g.oldest_version for g in groups]
        self._waiting_staleness = [train_version - v for v in known if v is not None]

    def metrics(self, *, queue_size: int, queue_bytes: int) -> dict[str, float]:
        """All figures of the window. Averages without a single value are left out."""
        out: dict[str, float] = {
            PREFIX + "queue_size": queue_size,
            PREFIX + "queue_bytes": queue_bytes,
            PREFIX + "aborted_groups_filtered": self._drops["failed"],
            PREFIX + "stale_groups_filtered": self._drops["stale"],
            PREFIX + "unknown_version_groups_filtered": self._drops["unknown_version"],
            PREFIX + "unknown_version_groups_consumed": self._unknown_consumed,
            PREFIX + "wasted_tokens": self._wasted_tokens,
        }
        for reason, count in sorted(self._filtered.items()):
            out[FILTER_PREFIX + reason] = count
        for name, values in (("staleness", self._staleness), ("buffer_staleness", self._waiting_staleness)):
            if values:
                head, _, tail = name.rpartition("_")
                join = f"{head}_" if head else ""
                out[f"{PREFIX}{join}avg_{tail}"] = mean(values)
                out[f"{PREFIX}{join}max_{tail}"] = max(values)
        for name, numbers in (
            ("generation_span", self._generation_span),
            ("queue_wait", self._queue_wait),
            ("publish_lag", self._publish_lag),
            ("generation_seconds", self._generation_s),
            ("queue_wait_seconds", self._queue_s),
        ):
            if numbers:
                out[PREFIX + name] = mean(numbers)
        if self._versions:
            oldest = [first for first, _ in self._versions]
            out[VERSION_PREFIX + "mean"] = mean(oldest)
            out[VERSION_PREFIX + "min"] = min(oldest)
            out[VERSION_PREFIX + "max"] = max(oldest)
            out[VERSION_PREFIX + "mixed_version_ratio"] = mean([first != last for first, last in self._versions])
        for side, data in (("trained", self._trained), ("dropped", self._dropped), ("left_out", self._left_out)):
            out[f"{BIAS_PREFIX}{side}_groups"] = data.groups
            out[f"{BIAS_PREFIX}{side}_trajectories"] = len(data.lengths)
            if data.lengths:
                out[f"{BIAS_PREFIX}{side}_length"] = mean(data.lengths)
            if data.rewards:
                out[f"{BIAS_PREFIX}{side}_reward"] = mean(data.rewards)
        return out
