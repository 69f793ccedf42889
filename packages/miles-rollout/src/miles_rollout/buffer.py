"""The bounded buffer between rollout and training, as a state machine without clocks, tasks or sockets.

    finished group --put--> [ waiting ... ] --collect--> [ leased ] --confirm--> trained
                     |                          |            |
                     |  failed                  |  stale     +--return_leased--> waiting again
                     |  unknown version
                     |  filtered / nothing sampled

A group is refused at `put` for what cannot change any more, and at `collect` for its age, measured against the
version that *will* train the batch. Times are seconds of whatever clock the caller reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from miles_contracts import Group, GroupFilter, InvalidFieldError
from miles_rollout.metrics import BufferWindow
from miles_rollout.order import TrainingOrder


class Verdict(StrEnum):
    """What the buffer did with a group."""

    KEPT = "kept"
    FAILED = "failed"
    UNKNOWN_VERSION = "unknown_version"
    FILTERED = "filtered"
    STALE = "stale"


class UnknownVersionPolicy(StrEnum):
    """Whether groups are trained whose weight version an engine did not say."""

    REFUSE = "refuse"
    KEEP = "keep"
    """Kept, never counted as fresh: they have no staleness and are taken first."""


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A group that will not be trained, and why."""

    group: Group
    verdict: Verdict
    reason: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag="buffered_group"):
    """A group in the buffer.

    Attributes:
        group: the finished group.
        generation_s: seconds from its start to its end.
        put_at: when it was put.
        order: how many groups were put before it.
    """

    group: Group
    generation_s: float
    put_at: float
    order: int

    @property
    def age_key(self) -> tuple[int, int]:
        """Sorts the oldest weights first, then the earliest arrival; unknown versions before all."""
        version = self.group.oldest_version
        return (-1 if version is None else version, self.order)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Groups leased to the trainer, ordered by prompt, and what was found stale on the way."""

    groups: tuple[Group, ...]
    stale: tuple[Dropped, ...] = ()


class GroupBuffer:
    """Holds finished groups until the trainer takes the first that pass: the oldest, or by prompt.

    Args:
        max_groups: bound of waiting groups.
        max_bytes: bound of their bytes, None for none. A single group larger than the bound is let into an
            empty buffer.
        max_staleness: largest accepted difference, in optimiser updates, between the version that trains a
            group and the oldest version that sampled it; None for no limit.
        group_filter: says which groups are worth training, None keeps all.
        unknown_version: policy for groups with tokens of unknown version.
        order: in which groups are taken.
    """

    def __init__(
        self,
        *,
        max_groups: int,
        max_bytes: int | None = None,
        max_staleness: int | None = None,
        group_filter: GroupFilter | None = None,
        unknown_version: UnknownVersionPolicy = UnknownVersionPolicy.REFUSE,
        order: TrainingOrder = TrainingOrder.ARRIVAL,
    ) -> None:
        if max_groups < 1:
            raise InvalidFieldError("max_groups", max_groups, "a buffer holds at least one group")
        if max_bytes is not None and max_bytes < 1:
            raise InvalidFieldError("max_bytes", max_bytes, "use a value >= 1, or leave it out")
        if max_staleness is not None and max_staleness < 0:
            raise InvalidFieldError("max_staleness", max_staleness, "use a value >= 0, or leave it out")
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._max_staleness = max_staleness
        self._filter = group_filter
        self._unknown = UnknownVersionPolicy(unknown_version)
        self._by_prompt = TrainingOrder(order) is TrainingOrder.PROMPT
        self._waiting: list[Entry] = []
        self._leased: dict[int, Entry] = {}
        self._bytes = 0
        self._arrivals = 0
        self._window = BufferWindow()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def order(self) -> TrainingOrder:
        """In which groups are taken."""
        return TrainingOrder.PROMPT if self._by_prompt else TrainingOrder.ARRIVAL

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting groups."""
        return self._bytes

    @property
    def max_groups(self) -> int:
        """Bound of waiting groups."""
        return self._max_groups

    @property
    def leased(self) -> int:
        """Groups collected and not yet confirmed as trained."""
        return len(self._leased)

    def judge(self, group: Group) -> Dropped | None:
        """Why `group` is refused on arrival, or None. Call once a group: a refusal is counted."""
        dropped = self._refusal(group)
        if dropped is not None:
            self._window.drop(dropped.verdict, dropped.reason, group)
        return dropped

    def leave_out(self, group: Group) -> None:
        """Count the prompt of a refused or stale `group` as left out: it will not be tried again."""
        self._window.leave_out(group)

    def waiting_before(self, prompt_index: int) -> int:
        """Waiting groups that come before a prompt in the stream."""
        return sum(e.group.prompt_index < prompt_index for e in self._waiting)

    def fits(self, group: Group) -> bool:
        """True when the bound of bytes admits `group`."""
        return self._max_bytes is None or not self._waiting or self._bytes + group.num_bytes <= self._max_bytes

    def has_room(self, group: Group, *, demand: int = 0, reserved: int = 0) -> bool:
        """True when `group` may be put.

        Args:
            group: what is to be put.
            demand: groups that a trainer is waiting for; while fewer are here the byte bound does not hold,
                because nothing would ever empty the buffer.
            reserved: room that is kept for others.
        """
        if len(self._waiting) + reserved >= self._max_groups:
            return False
        return self.fits(group) or len(self._waiting) < demand

    def put(self, group: Group, *, generation_s: float, now: float) -> None:
        """Store a group that `judge` accepted and `has_room` admits.

        By prompt whoever puts groups keeps the bound: the next batch has room even where a restored buffer is too
        full already (`Discipline.has_room`).
        """
        if len(self._waiting) >= self._max_groups and not self._by_prompt:
            raise InvalidFieldError("buffer", len(self._waiting), "it is full; wait until has_room says so")
        self._append(Entry(group=group, generation_s=generation_s, put_at=now, order=self._arrivals))

    def collect(
        self,
        count: int,
        *,
        train_version: int,
        now: float,
        engine_version: int | None = None,
        before: int | None = None,
    ) -> Batch:
        """Lease the first `count` groups that pass, or none at all while there are fewer.

        Groups too stale for `train_version` leave the buffer in either case and are in `Batch.stale`. By prompt no
        batch is given together with them: if one of them is tried again, the batch has to wait for it.

        Args:
            count: groups in the batch.
            train_version: optimiser updates in the weights that the batch will update.
            now: for the waiting times.
            engine_version: version that engines serve, to tell publish lag from queue wait.
            before: take only groups that come before this prompt in the stream; None for all.
        """
        if not 1 <= count <= self._max_groups:
            raise InvalidFieldError("count", count, f"a batch has 1 to max_groups ({self._max_groups}) groups")
        stale = self._take_stale(train_version)
        ready = [e for e in self._waiting if before is None or e.group.prompt_index < before]
        if len(ready) < count or (stale and self._by_prompt):
            return Batch(groups=(), stale=stale)
        ready.sort(key=lambda e: (e.group.prompt_index, 0) if self._by_prompt else e.age_key)
        taken = ready[:count]
        gone = {entry.order for entry in taken}
        self._waiting = [e for e in self._waiting if e.order not in gone]
        for entry in taken:
            self._bytes -= entry.group.num_bytes
            self._leased[entry.group.prompt_index] = entry
            self._window.consume(entry.group, entry.generation_s, now - entry.put_at, train_version, engine_version)
        self._window.observe_waiting([e.group for e in self._waiting], train_version)
        groups = sorted((e.group for e in taken), key=lambda g: g.prompt_index)
        return Batch(groups=tuple(groups), stale=stale)

    def confirm(self, groups: Iterable[Group]) -> None:
        """Leased `groups` were trained; they are gone for good."""
        for group in groups:
            if self._leased.pop(group.prompt_index, None) is None:
                raise InvalidFieldError("prompt_index", group.prompt_index, "not leased: trained twice?")

    def return_leased(self) -> None:
        """Put everything leased back into the queue, for a trainer that died before it trained them."""
        for entry in self._leased.values():
            self._waiting.append(entry)
            self._bytes += entry.group.num_bytes
        self._leased.clear()

    def metrics(self) -> dict[str, float]:
        """The figures since the last call, under their full names; starts a new window."""
        out = self._window.metrics(queue_size=len(self._waiting), queue_bytes=self._bytes)
        self._window = BufferWindow()
        return out

    def state(self) -> tuple[Entry, ...]:
        """Everything that is not trained yet, leased groups included, in order of arrival."""
        return tuple(sorted((*self._leased.values(), *self._waiting), key=lambda e: e.order))

    def restore(self, entries: Iterable[Entry], *, now: float) -> None:
        """Fill an empty buffer from a `state`. Waiting times start again; the bounds may be exceeded."""
        if self._waiting or self._leased:
            raise InvalidFieldError("buffer", len(self._waiting), "restore before anything is put")
        for entry in entries:
            self._append(msgspec.structs.replace(entry, put_at=now, order=self._arrivals))

    def _append(self, entry: Entry) -> None:
        self._waiting.append(entry)
        self._bytes += entry.group.num_bytes
        self._arrivals += 1

    def _refusal(self, group: Group) -> Dropped | None:
        if group.failed:
            return Dropped(group=group, verdict=Verdict.FAILED, reason=_failure(group))
        if not any(t.version_spans for t in group):
            return Dropped(group=group, verdict=Verdict.FILTERED, reason="nothing_sampled")
        if group.oldest_version is None and self._unknown is UnknownVersionPolicy.REFUSE:
            return Dropped(group=group, verdict=Verdict.UNKNOWN_VERSION, reason="an engine did not say its version")
        if self._filter is not None:
            decision = self._filter(group)
            if not decision.keep:
                return Dropped(group=group, verdict=Verdict.FILTERED, reason=decision.reason or "unnamed")
        return None

    def _take_stale(self, train_version: int) -> tuple[Dropped, ...]:
        if self._max_staleness is None:
            return ()
        stale, kept = [], []
        for entry in self._waiting:
            oldest = entry.group.oldest_version
            if oldest is not None and train_version - oldest > self._max_staleness:
                reason = f"{train_version - oldest} updates old, limit {self._max_staleness}"
                stale.append(Dropped(group=entry.group, verdict=Verdict.STALE, reason=reason))
                self._window.drop(Verdict.STALE, reason, entry.group)
                self._bytes -= entry.group.num_bytes
            else:
                kept.append(entry)
        self._waiting = kept
        return tuple(stale)


def _failure(group: Group) -> str:
    for trajectory in group:
        if trajectory.error:
            return trajectory.error
    return f"{len({t.identity.member for t in group})} of {group.size} members, or one was aborted"
