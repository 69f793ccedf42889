"""Admission: a group is started only if it can still be fresh enough when it is trained, and there is room for it.

A version is a number of optimiser updates. A group that starts now is sampled by the engines' version and, with
`outstanding` groups ahead of it (in flight or waiting in the buffer), will be trained in the batch

    next_train_version + (outstanding // batch_groups) * updates_per_batch

so the difference to the engines' version is its staleness at best. It is admitted while that is at most
`depth * updates_per_batch`. Depth 0 is therefore exactly the synchronous loop: the groups of one batch are
started per version and no more until the engines have the next version; depth k works k batches ahead. Because
the bound uses what is outstanding now and not a running total, dropped groups are replaced at once and a resumed
run needs no correction.
"""

from __future__ import annotations

from enum import StrEnum

from miles_contracts import InvalidFieldError


class Granularity(StrEnum):
    """When the slots of a group's trajectories are free again."""

    SAMPLE = "sample"
    """Each when it is finished."""
    GROUP = "group"
    """All together when the last is finished."""


class Refusal(StrEnum):
    """Why nothing more is started now."""

    DEPTH = "depth"
    """What is outstanding already fills the batches that may run ahead."""
    TRAJECTORIES = "trajectories"
    TOKENS = "tokens"


class _InFlight:
    __slots__ = ("members", "tokens_each")

    def __init__(self, members: int, tokens_each: int) -> None:
        self.members = members
        self.tokens_each = tokens_each


class Scheduler:
    """Counts what is in flight and decides whether one more group may start. A pure state machine.

    Args:
        batch_groups: groups in one training batch.
        group_size: trajectories in one group.
        depth: batches that rollout may run ahead of training; 0 is synchronous.
        max_trajectories: bound of trajectories in flight, None for no bound but the depth's.
        max_tokens: bound of tokens reserved by trajectories in flight, None for none. A group larger than
            the bound runs alone.
        granularity: when slots are freed.
        updates_per_batch: optimiser updates made from one batch.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        group_size: int,
        depth: int = 0,
        max_trajectories: int | None = None,
        max_tokens: int | None = None,
        granularity: Granularity = Granularity.SAMPLE,
        updates_per_batch: int = 1,
    ) -> None:
        for name, value, least in (
            ("batch_groups", batch_groups, 1),
            ("group_size", group_size, 1),
            ("depth", depth, 0),
            ("updates_per_batch", updates_per_batch, 1),
        ):
            if value < least:
                raise InvalidFieldError(name, value, f"use a value >= {least}")
        if max_trajectories is not None and max_trajectories < group_size:
            raise InvalidFieldError("max_trajectories", max_trajectories, f"one group needs {group_size}")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidFieldError("max_tokens", max_tokens, "use a value >= 1, or leave it out")
        self._batch = batch_groups
        self._size = group_size
        self._depth = depth
        self._max_trajectories = max_trajectories
        self._max_tokens = max_tokens
        self._granularity = Granularity(granularity)
        self._updates = updates_per_batch
        self._groups: dict[int, _InFlight] = {}
        self._trajectories = 0
        self._tokens = 0
        self._engine_version = 0
        self._next_train_version = 0

    @property
    def batch_groups(self) -> int:
        """Groups in one training batch."""
        return self._batch

    @property
    def group_size(self) -> int:
        """Trajectories in one group."""
        return self._size

    @property
    def updates_per_batch(self) -> int:
        """Optimiser updates made from one batch."""
        return self._updates

    @property
    def engine_version(self) -> int:
        """Version that new trajectories are sampled by."""
        return self._engine_version

    @property
    def next_train_version(self) -> int:
        """Version that will train the next batch to be collected."""
        return self._next_train_version

    @property
    def trajectories_in_flight(self) -> int:
        """Occupied slots."""
        return self._trajectories

    @property
    def tokens_in_flight(self) -> int:
        """Reserved tokens of occupied slots."""
        return self._tokens

    @property
    def groups_in_flight(self) -> int:
        """Groups that were started and not yet ended."""
        return len(self._groups)

    def set_versions(self, *, engine: int | None = None, next_train: int | None = None) -> None:
        """Note that the engines serve `engine`, or that `next_train` trains the next batch to be collected."""
        engine = self._engine_version if engine is None else engine
        next_train = self._next_train_version if next_train is None else next_train
        if engine < self._engine_version:
            raise InvalidFieldError("engine version", engine, f"versions never go back from {self._engine_version}")
        if next_train < engine:
            raise InvalidFieldError("train version", next_train, f"the engines already serve {engine}")
        self._engine_version, self._next_train_version = engine, next_train

    def refusal(self, *, buffered_groups: int, tokens_each: int, groups_ahead: int | None = None) -> Refusal | None:
        """Why one more group may not start now, or None when it may.

        Args:
            buffered_groups: finished groups that wait to be collected.
            tokens_each: most tokens that one of its trajectories can have.
            groups_ahead: groups that will be trained before it; None for all that are outstanding.
        """
        if groups_ahead is None:
            groups_ahead = len(self._groups) + buffered_groups
        ahead = groups_ahead // self._batch * self._updates
        if self._next_train_version + ahead - self._engine_version > self._depth * self._updates:
            return Refusal.DEPTH
        if not self._trajectories:
            return None
        if self._max_trajectories is not None and self._trajectories + self._size > self._max_trajectories:
            return Refusal.TRAJECTORIES
        if self._max_tokens is not None and self._tokens + self._size * tokens_each > self._max_tokens:
            return Refusal.TOKENS
        return None

    def start(self, prompt_index: int, *, tokens_each: int) -> None:
        """Occupy the slots of one group."""
        if prompt_index in self._groups:
            raise InvalidFieldError("prompt_index", prompt_index, "this group is already in flight")
        self._groups[prompt_index] = _InFlight(self._size, tokens_each)
        self._trajectories += self._size
        self._tokens += self._size * tokens_each

    def member_done(self, prompt_index: int) -> None:
        """One trajectory of a group ended, in whatever way."""
        group = self._groups[prompt_index]
        if self._granularity is Granularity.SAMPLE and group.members:
            self._release(group, 1)

    def all_members_done(self, prompt_index: int) -> None:
        """Nothing of a group is generated any more: its slots are free, though the group is still outstanding."""
        group = self._groups[prompt_index]
        self._release(group, group.members)

    def group_done(self, prompt_index: int) -> None:
        """A group ended, in whatever way; all it still occupies is free, and it is no longer outstanding."""
        group = self._groups.pop(prompt_index)
        self._release(group, group.members)

    def _release(self, group: _InFlight, members: int) -> None:
        group.members -= members
        self._trajectories -= members
        self._tokens -= members * group.tokens_each
