"""The rollout worker keeps groups in flight and fills the buffer; what goes wrong in it is counted or ends it loudly.

There is no loop: every event (a trajectory ends, a batch is collected, new weights, a resume) calls `_fill`, which
starts as many groups as the scheduler admits. Each group is one task, each member a task below it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from miles_contracts import (
    DeadlineExceededError,
    Generate,
    Group,
    InvalidFieldError,
    MilesError,
    Task,
)
from miles_rollout.buffer import Batch, Dropped, Entry, GroupBuffer
from miles_rollout.discipline import Discipline
from miles_rollout.episodes import EpisodeRunner, ErrorPolicy, GroupReward, WorkerConfig
from miles_rollout.fates import Fates
from miles_rollout.filters import FilterStreak
from miles_rollout.ledger import Fate, Issue, Ledger
from miles_rollout.metrics import PREFIX
from miles_rollout.scheduler import Scheduler
from miles_rollout.tasks import TaskSource

_log = logging.getLogger(__name__)

__all__ = ["ErrorPolicy", "GroupReward", "RolloutDiedError", "RolloutWorker", "WorkerConfig", "WorkerState"]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="worker_state"):
    """All that a resumed run needs in order to lose no prompt and train none twice.

    Attributes:
        source: state of the task source.
        again: prompts to issue again, in order.
        kept: the ledger's record of the prompts in `entries`.
        entries: finished groups that are not trained, oldest arrival first.
    """

    source: dict[str, Any]
    again: tuple[Issue, ...]
    kept: tuple[Issue, ...]
    entries: tuple[Entry, ...]


class RolloutDiedError(MilesError):
    """The worker cannot go on; the message names the reason, the cause is chained."""


class RolloutWorker:
    """Generates groups under admission control and hands batches to the trainer.

    Args:
        source: where prompts come from.
        generate: makes the trajectories of one member.
        buffer: where finished groups wait.
        scheduler: admission.
        ledger: its `stride` must be 1 + `config.replace_members`, and its order the buffer's; None makes one that
            drops unused prompts.
        group_reward: scores whole groups, for trajectories that `generate` left without a reward.
        config: timeouts and error policy.
        clock: seconds, for the figures only.

    Attributes:
        on_warning: also told, in words, what the log is warned of for people; None for the log alone.
    """

    def __init__(
        self,
        *,
        source: TaskSource,
        generate: Generate,
        buffer: GroupBuffer,
        scheduler: Scheduler,
        ledger: Ledger | None = None,
        group_reward: GroupReward | None = None,
        config: WorkerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or WorkerConfig()
        stride = 1 + self._config.replace_members
        self._ledger = ledger if ledger is not None else Ledger(stride=stride, order=buffer.order)
        if self._ledger.stride != stride:
            raise InvalidFieldError("ledger.stride", self._ledger.stride, f"use 1 + replace_members, {stride}")
        self._source = source
        self._episodes = EpisodeRunner(
            generate=generate, group_reward=group_reward, config=self._config, group_size=scheduler.group_size
        )
        self._buffer = buffer
        self._scheduler = scheduler
        self._discipline = Discipline(scheduler, buffer, self._ledger)
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked: dict[int, Entry] = {}
        self._holds: set[str] = set()
        self._running = False
        self._demand = 0
        self._death: RolloutDiedError | None = None
        self._changed = asyncio.Event()
        self._failures_in_a_row = 0
        self._streak = FilterStreak(self._config.max_filtered_in_a_row)
        self.on_warning: Callable[[str], None] | None = None
        self._fates = Fates(self._warn)
        self._window = _Window()
        self._parked_since: float | None = None

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self, version: int) -> None:
        """Begin to generate; `version` is what the engines serve and what trains the first batch."""
        if self._running:
            raise InvalidFieldError("worker", "running", "start it once")
        self._scheduler.set_versions(engine=version, next_train=version)
        self._running = True
        self._fill()

    async def close(self) -> None:
        """Cancel everything in flight and wait until it has ended."""
        self._running = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._notify()

    def check(self) -> None:
        """Raise the reason if the worker died."""
        if self._death is not None:
            raise self._death

    def set_engine_version(self, version: int) -> None:
        """The engines now serve `version`; admission follows."""
        self._scheduler.set_versions(engine=version)
        self._fill()

    def pause_new(self, why: str = "pause") -> None:
        """Start no new groups until `resume_new(why)`; what is in flight goes on and reaches the buffer."""
        self._holds.add(why)

    def resume_new(self, why: str = "pause") -> None:
        """Lift one pause; new groups start when no other is left."""
        self._holds.discard(why)
        self._fill()

    async def quiesce(self, *, deadline_s: float | None = None) -> None:
        """Wait until nothing is being generated. Groups that wait for room in the buffer do not count."""
        try:
            async with asyncio.timeout(deadline_s):
                self.check()
                while self._scheduler.groups_in_flight > len(self._parked):
                    await self._changed.wait()
                    self.check()
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"{self._scheduler.trajectories_in_flight} trajectories in flight",
                deadline_s or 0.0,
                "raise the deadline, or set episode_timeout_s",
            ) from error

    # -- the trainer's side -------------------------------------------------------------------------------

    async def collect(self, count: int, *, train_version: int) -> Batch:
        """The first `count` groups that pass, in the order of training, leased until `confirm`.

        Args:
            count: groups in the batch.
            train_version: optimiser updates in the weights that the batch will update.

        Raises:
            RolloutDiedError: the worker died, even when the buffer holds enough.
            DeadlineExceededError: nothing at all happened for `no_progress_s`.
        """
        self._scheduler.set_versions(next_train=train_version)
        self._demand = count
        started = self._clock()
        try:
            while True:
                self.check()
                self._fill()
                self._notify()
                batch = self._discipline.collect(
                    count,
                    train_version=train_version,
                    engine_version=self._scheduler.engine_version,
                    now=self._clock(),
                    parked=self._parked,
                )
                for dropped in batch.stale:
                    self._settle(self._ledger.stale(dropped.group.prompt_index), dropped)
                if batch.groups:
                    break
                if batch.stale:
                    continue
                await self._wait_for_progress()
        finally:
            self._demand = 0
            self._window.trainer_wait_s += self._clock() - started
        self._scheduler.set_versions(next_train=train_version + self._scheduler.updates_per_batch)
        self._notify()
        self._fill()
        return batch

    def confirm(self, groups: Sequence[Group]) -> None:
        """`groups` were trained: they will not be part of any later state."""
        self._buffer.confirm(groups)
        for group in groups:
            self._ledger.finished(group.prompt_index)

    def return_leased(self) -> None:
        """The trainer died before it trained what it had collected: offer it again."""
        self._buffer.return_leased()
        self._notify()

    def state(self) -> WorkerState:
        """A consistent picture of this moment."""
        again, kept = self._ledger.state()
        entries = (*self._buffer.state(), *self._parked.values())
        return WorkerState(source=self._source.state(), again=again, kept=kept, entries=entries)

    def restore(self, state: WorkerState) -> None:
        """Continue from `state`; before `start`."""
        if self._running:
            raise InvalidFieldError("worker", "running", "restore before start")
        self._source.restore(state.source)
        self._ledger.restore(state.again, state.kept)
        self._buffer.restore(state.entries, now=self._clock())

    @property
    def failures(self) -> Mapping[str, int]:
        """Groups that failed since the start, by the reason of the first of each kind of fault."""
        return self._fates.failures

    def metrics(self) -> dict[str, float]:
        """The buffer's and the worker's figures since the last call."""
        self._mark_parked()
        counts = self._episodes.take_counts()
        out = self._buffer.metrics()
        out[PREFIX + "wasted_tokens"] += counts.wasted_tokens
        out |= {
            PREFIX + "in_flight_groups": self._scheduler.groups_in_flight,
            PREFIX + "in_flight_trajectories": self._scheduler.trajectories_in_flight,
            PREFIX + "in_flight_tokens": self._scheduler.tokens_in_flight,
            PREFIX + "replaced_members": counts.replaced,
            "rollout/failed_ratio": counts.failed / counts.finished if counts.finished else 0.0,
        }
        out |= {f"rollout/errors/{kind}": float(count) for kind, count in sorted(counts.errors.items())}
        out |= self._window.metrics() | self._fates.take_metrics()
        self._window = _Window()
        return out

    # -- the producer's side ------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start every group that may start now. A full buffer (parked groups) stops the producer."""
        if not self._running or self._death is not None:
            return
        tokens = self._config.tokens_per_trajectory
        while not self._holds and self._discipline.may_start(parked=self._parked, tokens_each=tokens):
            try:
                issue = self._ledger.begin_waiting()
                task = self._source.at(issue.prompt_index) if issue is not None else self._source.next()
                issue = issue if issue is not None else self._ledger.begin_fresh(task.prompt_index)
            except Exception as error:  # noqa: BLE001 - supervisor: a broken source ends the worker, loudly
                self._die(f"the task source failed: {type(error).__name__}: {error}", error)
                return
            self._scheduler.start(issue.prompt_index, tokens_each=tokens)
            running = asyncio.create_task(self._run_group(task, issue), name=f"group-{issue.prompt_index}")
            self._tasks.add(running)
            running.add_done_callback(self._group_ended)

    async def _run_group(self, task: Task, issue: Issue) -> None:
        started = self._clock()
        try:
            done = functools.partial(self._member_done, issue.prompt_index)
            group = await self._episodes.run(task, issue, member_done=done)
            self._scheduler.all_members_done(issue.prompt_index)
            await self._hand_over(group, self._clock() - started)
        finally:
            # A parked group stays parked when the worker is closed, so that `state` still has it.
            self._scheduler.group_done(issue.prompt_index)

    def _member_done(self, prompt_index: int) -> None:
        self._scheduler.member_done(prompt_index)
        self._notify()
        self._fill()

    async def _hand_over(self, group: Group, generation_s: float) -> None:
        dropped = self._buffer.judge(group)
        if dropped is None:
            self._failures_in_a_row = 0
            self._streak.kept()
            self._ledger.kept(group.prompt_index)
            entry = Entry(group=group, generation_s=generation_s, put_at=self._clock(), order=0)
            while not self._discipline.has_room(group, demand=self._demand):
                self._mark_parked()
                self._parked[group.prompt_index] = entry
                self._parked_since = self._parked_since if self._parked_since is not None else self._clock()
                self._fill()  # its slots are free for the retry of an earlier prompt
                await self._changed.wait()
            self._mark_parked()
            self._buffer.put(group, generation_s=generation_s, now=entry.put_at)
            self._parked.pop(group.prompt_index, None)
            self._parked_since = self._parked_since if self._parked else None
            return
        if dropped.verdict == "filtered":
            self._failures_in_a_row = 0
            self._ledger.finished(group.prompt_index)
            self._buffer.leave_out(group)
            self._count_filtered(dropped)
            return
        self._fates.failed(dropped)
        self._settle(self._ledger.failed(group.prompt_index), dropped)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._config.max_failures_in_a_row:
            raise RolloutDiedError(f"{self._failures_in_a_row} groups in a row failed; the last: {dropped.reason}")

    def _count_filtered(self, dropped: Dropped) -> None:
        self._streak.filtered(dropped.group, dropped.reason)
        if self._streak.ended:
            raise RolloutDiedError(str(self._streak))
        if self._streak.warns:
            self._warn(str(self._streak))

    # -- supervision --------------------------------------------------------------------------------------

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"{task.get_name()} failed: {type(error).__name__}: {error}", error)
        self._notify()
        self._fill()

    def _die(self, reason: str, cause: BaseException) -> None:
        if self._death is None:
            self._death = cause if isinstance(cause, RolloutDiedError) else RolloutDiedError(reason)
            if self._death is not cause:
                self._death.__cause__ = cause
        self._notify()

    def _settle(self, fate: Fate, dropped: Dropped) -> None:
        self._fates.settle(fate, dropped)
        if fate is not Fate.RETRIED:
            self._buffer.leave_out(dropped.group)

    def _warn(self, text: str) -> None:
        _log.warning("%s", text)
        if self.on_warning is not None:
            self.on_warning(f"warning: {text}")

    def _notify(self) -> None:
        """Wake everybody that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_progress(self) -> None:
        limit = None if self._holds else self._config.no_progress_s
        try:
            async with asyncio.timeout(limit):
                await self._changed.wait()
        except TimeoutError as error:
            if self._holds:  # paused meanwhile: no progress is expected
                return
            flying = self._scheduler.trajectories_in_flight
            raise DeadlineExceededError(
                f"rollout progress ({flying} trajectories in flight, {len(self._buffer)} groups ready)",
                limit or 0.0,
                "look at the engines' logs, set episode_timeout_s, or raise no_progress_s",
            ) from error

    def _mark_parked(self) -> None:
        """Move the time for which groups have been waiting for room into the window."""
        if self._parked_since is not None:
            now = self._clock()
            self._window.producer_wait_s += now - self._parked_since
            self._parked_since = now


class _Window:
    """What the worker counted since the last report."""

    def __init__(self) -> None:
        self.producer_wait_s = 0.0
        self.trainer_wait_s = 0.0

    def metrics(self) -> dict[str, float]:
        return {
            PREFIX + "producer_wait_seconds": self.producer_wait_s,
            PREFIX + "trainer_wait_seconds": self.trainer_wait_s,
        }
