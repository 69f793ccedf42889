"""What the order of training means for starting, keeping and collecting groups, so that none waits for ever.

By arrival every finished group is as good as any other. By prompt the trainer waits for certain groups, those that are
next in the stream, and whatever it waits for must be able to come:

    trained | leased |  next batch   | later ...
            |        |  o  o  .  o   |  o . . o . . . .        o finished   . in flight or waiting for a retry

- A retry is started as early as its place in this line allows, before anything new, and also while later groups wait
  for room in the buffer.
- The buffer always has room for the next batch: later groups only get what is left of it. Its bound of bytes gives
  way when the trainer waits.
- A group is collected when nothing before it is missing.

In return a group is trained by the batch that its place said when it was started, so that by prompt staleness never
exceeds what was admitted.
"""

from __future__ import annotations

from collections.abc import Collection

from miles_contracts import Group, InvalidFieldError
from miles_rollout.buffer import Batch, GroupBuffer
from miles_rollout.ledger import Ledger
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Scheduler


class Discipline:
    """Asks scheduler, buffer and ledger for what is about all three. It has no state of its own.

    Args:
        scheduler: admission.
        buffer: where finished groups wait; its order must be the ledger's.
        ledger: where every prompt is.
    """

    def __init__(self, scheduler: Scheduler, buffer: GroupBuffer, ledger: Ledger) -> None:
        if buffer.order is not ledger.order:
            raise InvalidFieldError("ledger.order", ledger.order.value, f"the buffer's is {buffer.order.value}")
        if buffer.max_groups < scheduler.batch_groups:
            raise InvalidFieldError("max_groups", buffer.max_groups, f"one batch has {scheduler.batch_groups} groups")
        self._scheduler = scheduler
        self._buffer = buffer
        self._ledger = ledger
        self._by_prompt = buffer.order is TrainingOrder.PROMPT

    def may_start(self, *, parked: Collection[int], tokens_each: int) -> bool:
        """Whether one more group may be started: the ledger's first waiting one, else a new one.

        Args:
            parked: prompts of finished groups that wait for room in the buffer.
            tokens_each: most tokens that one of its trajectories can have.
        """
        ahead = None
        if self._by_prompt:
            issue = self._ledger.next_waiting
            index = None if issue is None else issue.prompt_index
            ahead = self._ahead(index)
            parked = [p for p in parked if index is None or p < index]
        if parked:
            return False
        refusal = self._scheduler.refusal(
            buffered_groups=len(self._buffer), tokens_each=tokens_each, groups_ahead=ahead
        )
        return refusal is None

    def has_room(self, group: Group, *, demand: int = 0) -> bool:
        """True when the finished `group` may be put into the buffer.

        Args:
            group: what is to be put.
            demand: groups that a trainer is waiting for.
        """
        if not self._by_prompt:
            return self._buffer.has_room(group, demand=demand)
        place, batch = self._ahead(group.prompt_index), self._scheduler.batch_groups
        if place < batch:
            return place < demand or self._buffer.fits(group)
        later = self._ledger.prompt_at(self._buffer.leased + batch)
        return self._buffer.has_room(group, reserved=batch - self._buffer.waiting_before(later))

    def collect(
        self,
        count: int,
        *,
        train_version: int,
        now: float,
        parked: Collection[int],
        engine_version: int | None = None,
    ) -> Batch:
        """`GroupBuffer.collect`; by prompt no further than to the first group that is still missing."""
        missing = None
        if self._by_prompt:
            unfinished = self._ledger.first_unfinished
            missing = min((*parked, *(() if unfinished is None else (unfinished,))), default=None)
        return self._buffer.collect(
            count, train_version=train_version, now=now, engine_version=engine_version, before=missing
        )

    def _ahead(self, prompt_index: int | None) -> int:
        """Groups that will be trained before that of a prompt; None is the source's next prompt."""
        return self._ledger.count_before(prompt_index) - self._buffer.leased
