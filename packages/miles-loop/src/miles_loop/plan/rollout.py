"""The rollout half in simulated time: the product's own scheduler, buffer, ledger and router table decide everything.

Only what they wait for is simulated: engines and environments. The order of events is that of the rollout worker;
a test runs both on the same work and compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from miles_contracts import FilterDecision, Group, Status, Trajectory, TrajectoryIdentity, VersionSpan
from miles_loop.plan.engine import EngineRates, Request, SimEngine
from miles_loop.plan.settings import Pipeline
from miles_loop.plan.workload import Episode, Workload
from miles_rollout.buffer import Batch, GroupBuffer
from miles_rollout.discipline import Discipline
from miles_rollout.ledger import Issue, Ledger
from miles_rollout.router.table import RouterTable
from miles_rollout.scheduler import Scheduler

Action = Callable[[float], None]
"""What happens at a time, which it is called with."""
_IDS = (np.zeros(1, np.int32), np.zeros(2, np.int32))
_MASKS = (np.ones(1, np.bool_), np.ones(2, np.bool_))
_LOGPROBS = (np.zeros(1, np.float32), np.zeros(2, np.float32))


@dataclass(slots=True, eq=False)
class _Flight:
    """A group in flight."""

    issue: Issue
    started: float
    filtered: bool
    left: int
    made: list[Trajectory]
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Member:
    """One trajectory in flight."""

    flight: _Flight
    index: int
    episode: Episode
    key: str
    worker: int = 0
    turn: int = 0
    context: int = 0
    engine: int = -1
    cached_version: int = -1
    oldest: int = -1
    newest: int = -1


class SimRollout:
    """Groups in flight, their engines, and the buffer.

    Args:
        pipeline: shape of the run.
        workload: what trajectories ask for.
        rates: of every engine.
        later: called with (time, action): has the action called with the time when it is that late.
    """

    def __init__(
        self, pipeline: Pipeline, workload: Workload, rates: EngineRates, later: Callable[[float, Action], None]
    ) -> None:
        self._pipeline = pipeline
        self._workload = workload
        self._later = later
        self._latency_s = rates.latency_s
        self._handled_until = [0.0] * pipeline.rollout_workers
        self._members = 0
        self._prompts = 0
        self._parked: list[tuple[_Flight, Group, float]] = []
        self._refused: set[tuple[int, int]] = set()
        self._tokens: dict[int, int] = {}
        self._held = False
        self.engines = [SimEngine(rates) for _ in range(pipeline.engines)]
        self.router = RouterTable([str(i) for i in range(pipeline.engines)])
        self.scheduler = Scheduler(
            batch_groups=pipeline.batch_groups,
            group_size=pipeline.group_size,
            depth=pipeline.depth,
            max_trajectories=pipeline.max_in_flight,
            granularity=pipeline.granularity,
        )
        self.buffer = GroupBuffer(
            max_groups=pipeline.room,
            max_staleness=pipeline.max_staleness,
            group_filter=self._decide,
            order=pipeline.order,
        )
        self.ledger = Ledger(
            on_failure=pipeline.on_failure,
            on_stale=pipeline.on_stale,
            max_retries=pipeline.max_retries,
            order=pipeline.order,
        )
        self.discipline = Discipline(self.scheduler, self.buffer, self.ledger)
        self.counts: Counter[str] = Counter()
        """Groups started, trained and dropped by reason."""
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.touched: set[int] = set()
        """Engines whose next event may have changed."""

    @property
    def parked(self) -> int:
        """Finished groups that wait for room in the buffer."""
        return len(self._parked)

    @property
    def _waiting_for_room(self) -> list[int]:
        """Prompts of the parked groups."""
        return [group.prompt_index for _, group, _ in self._parked]

    @property
    def groups_in_flight(self) -> int:
        """Groups that are being generated."""
        return self.scheduler.groups_in_flight - len(self._parked)

    # -- producing ----------------------------------------------------------------------------------------

    def hold(self, held: bool) -> None:
        """Start no new groups while held."""
        self._held = held

    def fill(self, now: float) -> None:
        """Start every group that may start now."""
        while not self._held and self.discipline.may_start(parked=self._waiting_for_room, tokens_each=0):
            issue = self.ledger.begin_waiting()
            if issue is None:
                issue = self.ledger.begin_fresh(self._prompts)
                self._prompts += 1
            self.scheduler.start(issue.prompt_index, tokens_each=0)
            self._start(issue, now)

    def _start(self, issue: Issue, now: float) -> None:
        prompt, attempt, size = issue.prompt_index, issue.attempt, self._pipeline.group_size
        self.counts["started"] += 1
        flight = _Flight(issue, now, self._workload.filtered(prompt, attempt), size, [])
        for index in range(size):
            episode = self._workload.episode(prompt, index, attempt)
            worker = self._members % len(self._handled_until)
            self._members += 1
            self._next_turn(Member(flight, index, episode, f"{prompt}-{index}-{attempt}", worker), now)

    def _next_turn(self, member: Member, now: float) -> None:
        turn = member.episode.turns[member.turn]
        name = self.router.place(member.key, member.context + turn.new_prompt + turn.sampled)
        assert name is not None  # no simulated engine is ever out of service
        self._at(self._handled(member.worker, now) + self._latency_s / 2, now, partial(self._arrive, member, int(name)))

    def _handled(self, worker: int, now: float) -> float:
        """When a process that makes trajectories is done with half of a turn that it is given now."""
        self._handled_until[worker] = max(self._handled_until[worker], now) + self._pipeline.handling_s / 2
        return self._handled_until[worker]

    def _at(self, time: float, now: float, action: Action) -> None:
        """At once when it is time, later when it is not."""
        if time > now:
            self._later(time, action)
        else:
            action(now)

    def _arrive(self, member: Member, number: int, now: float) -> None:
        """A turn has reached its engine."""
        turn = member.episode.turns[member.turn]
        context = member.context + turn.new_prompt
        engine = self.engines[number]
        engine.advance(now)
        warm = self._pipeline.prefix_cache and (number, engine.version) == (member.engine, member.cached_version)
        prefill = turn.new_prompt if warm else context
        self.prefill_tokens += prefill
        self.cached_tokens += context - prefill
        member.engine, member.context = number, context
        engine.add(Request(member, prefill, context, turn.sampled))
        self.touched.add(number)

    def sampled(self, request: Request, now: float) -> None:
        """An engine has finished a turn; its answer is on its way."""
        member = request.owner
        assert isinstance(member, Member)
        member.context += request.sampled
        member.oldest = request.first_version if member.turn == 0 else min(member.oldest, request.first_version)
        member.newest = request.last_version
        member.cached_version = request.first_version
        self._at(now + self._latency_s / 2, now, partial(self._answered, member))

    def _answered(self, member: Member, now: float) -> None:
        """The answer is there; when it has been dealt with, the environment is busy."""
        turn = member.episode.turns[member.turn]
        self.router.done(str(member.engine), member.context)
        member.turn += 1
        self._later(self._handled(member.worker, now) + turn.delay_s, partial(self.delay_over, member))

    def delay_over(self, member: Member, now: float) -> None:
        """The environment of a member has answered: the next turn, or the end."""
        if member.turn < len(member.episode.turns):
            self._next_turn(member, now)
            return
        self.router.forget(member.key)
        flight = member.flight
        flight.made.append(_trajectory(member))
        flight.tokens += member.context
        flight.left -= 1
        self.scheduler.member_done(flight.issue.prompt_index)
        self.fill(now)
        if not flight.left:
            self._hand_over(flight, now)
            self.fill(now)

    def _hand_over(self, flight: _Flight, now: float) -> None:
        issue = flight.issue
        self.scheduler.all_members_done(issue.prompt_index)
        flight.made.sort(key=lambda t: t.identity.member)
        group = Group(
            prompt_index=issue.prompt_index,
            size=self._pipeline.group_size,
            trajectories=tuple(flight.made),
            attempt=issue.attempt,
        )
        if flight.filtered:
            self._refused.add((issue.prompt_index, issue.attempt))
        dropped = self.buffer.judge(group)
        if dropped is None:
            self.ledger.kept(issue.prompt_index)
            self._parked.append((flight, group, now))
            self._unpark()
            return
        self.counts[str(dropped.verdict)] += 1
        if dropped.verdict == "filtered":
            self.ledger.finished(issue.prompt_index)
        else:
            self.ledger.failed(issue.prompt_index)
        self.scheduler.group_done(issue.prompt_index)
        self._unpark()  # by prompt, later groups have moved up

    def _unpark(self) -> None:
        """Put what waits into the buffer, in the order in which it was finished, as far as there is room for it."""
        waiting, self._parked = self._parked, []
        for flight, group, finished in waiting:
            if not self.discipline.has_room(group):
                self._parked.append((flight, group, finished))
                continue
            self._tokens[group.prompt_index] = flight.tokens
            self.buffer.put(group, generation_s=finished - flight.started, now=finished)
            self.scheduler.group_done(group.prompt_index)

    def _decide(self, group: Group) -> FilterDecision:
        key = (group.prompt_index, group.attempt)
        if key in self._refused:
            self._refused.discard(key)
            return FilterDecision(keep=False, reason="simulated")
        return FilterDecision(keep=True)

    # -- consuming ----------------------------------------------------------------------------------------

    def wanted_by(self, train_version: int, now: float) -> None:
        """The trainer begins to wait for the batch that `train_version` trains."""
        self.scheduler.set_versions(next_train=train_version)
        self.fill(now)

    def collect(self, train_version: int, now: float) -> tuple[Batch, int] | None:
        """The batch and its tokens if there is one, else None."""
        while True:
            batch = self.discipline.collect(
                self._pipeline.batch_groups,
                train_version=train_version,
                engine_version=self.scheduler.engine_version,
                now=now,
                parked=self._waiting_for_room,
            )
            for dropped in batch.stale:
                self.counts["stale"] += 1
                self._tokens.pop(dropped.group.prompt_index)
                self.ledger.stale(dropped.group.prompt_index)
            if batch.groups:
                break
            if not batch.stale:
                return None
            self._unpark()
            self.fill(now)
        self.scheduler.set_versions(next_train=train_version + 1)
        self._unpark()
        self.fill(now)
        return batch, sum(self._tokens.pop(group.prompt_index) for group in batch.groups)

    def confirm(self, groups: Sequence[Group]) -> None:
        """`groups` were trained."""
        self.counts["trained"] += len(groups)
        self.buffer.confirm(groups)
        for group in groups:
            self.ledger.finished(group.prompt_index)

    def pause(self, now: float) -> None:
        """Engines stop for new weights."""
        for number, engine in enumerate(self.engines):
            engine.advance(now)
            engine.pause()
            self.touched.add(number)

    def resume(self, version: int, now: float) -> None:
        """Engines go on with new weights."""
        for number, engine in enumerate(self.engines):
            engine.advance(now)
            engine.resume(version, recompute=self._pipeline.retract)
            self.touched.add(number)


def _trajectory(member: Member) -> Trajectory:
    """What buffer and metrics look at, with one token for each weight version instead of all tokens."""
    oldest, newest = member.oldest, member.newest
    spans: tuple[VersionSpan, ...] = (VersionSpan(start=0, end=1, version=oldest),)
    if newest != oldest:
        spans = (*spans, VersionSpan(start=1, end=2, version=newest))
    which = len(spans) - 1
    issue = member.flight.issue
    failed = member.episode.fails
    return Trajectory(
        identity=TrajectoryIdentity(
            prompt_index=issue.prompt_index, member=member.index, attempt=issue.attempt, session_id=member.key
        ),
        token_ids=_IDS[which],
        loss_mask=_MASKS[which],
        logprobs=_LOGPROBS[which],
        version_spans=spans,
        status=Status.FAILED if failed else Status.FINISHED,
        error="simulated" if failed else None,
    )
