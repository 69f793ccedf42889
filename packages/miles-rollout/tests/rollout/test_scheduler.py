"""Admission bounds staleness and work in flight, and frees slots exactly once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_contracts import InvalidFieldError
from miles_rollout.scheduler import Granularity, Refusal, Scheduler


def fill(scheduler: Scheduler, buffered: int = 0, first: int = 0, tokens_each: int = 10) -> int:
    started = 0
    while scheduler.refusal(buffered_groups=buffered, tokens_each=tokens_each) is None:
        scheduler.start(first + started, tokens_each=tokens_each)
        started += 1
    return started


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_bounds_what_is_outstanding(depth: int) -> None:
    scheduler = Scheduler(batch_groups=4, group_size=2, depth=depth)
    assert fill(scheduler) == 4 * (depth + 1)
    assert scheduler.refusal(buffered_groups=0, tokens_each=10) is Refusal.DEPTH


def test_depth_zero_starts_one_batch_per_version() -> None:
    scheduler = Scheduler(batch_groups=3, group_size=2, depth=0)
    for version in range(4):
        assert fill(scheduler, first=version * 3) == 3
        for index in range(version * 3, version * 3 + 3):
            scheduler.group_done(index)
        scheduler.set_versions(next_train=version + 1)  # the batch is being trained
        assert fill(scheduler) == 0
        scheduler.set_versions(engine=version + 1)


def test_depth_one_starts_the_next_batch_while_one_is_trained() -> None:
    scheduler = Scheduler(batch_groups=3, group_size=2, depth=1)
    assert fill(scheduler) == 6
    for index in range(3):
        scheduler.group_done(index)
    assert fill(scheduler, buffered=3) == 0
    scheduler.set_versions(next_train=1)  # the three were collected; engines still serve version 0
    assert fill(scheduler) == 0, "a seventh group would be trained at version 2, two updates after 0"
    scheduler.set_versions(engine=1)
    assert fill(scheduler, first=6) == 3


def test_dropped_groups_are_replaced_at_once() -> None:
    scheduler = Scheduler(batch_groups=3, group_size=2, depth=0)
    fill(scheduler)
    scheduler.group_done(1)
    assert fill(scheduler, buffered=0, first=3) == 1


def test_several_updates_a_batch() -> None:
    scheduler = Scheduler(batch_groups=2, group_size=1, depth=1, updates_per_batch=4)
    assert fill(scheduler) == 4
    scheduler.group_done(0)
    scheduler.group_done(1)
    scheduler.set_versions(next_train=4)
    assert fill(scheduler) == 0
    scheduler.set_versions(engine=4)
    assert fill(scheduler, first=4) == 2


def test_sample_granularity_frees_slots_one_by_one() -> None:
    for granularity, expected in ((Granularity.SAMPLE, 1), (Granularity.GROUP, 0)):
        scheduler = Scheduler(batch_groups=100, group_size=4, depth=0, max_trajectories=8, granularity=granularity)
        assert fill(scheduler) == 2
        assert scheduler.refusal(buffered_groups=0, tokens_each=10) is Refusal.TRAJECTORIES
        for group in (0, 1):  # one straggler is left in each group
            for _ in range(2):
                scheduler.member_done(group)
        assert fill(scheduler, first=2) == expected


def test_tokens_are_bounded_and_a_giant_runs_alone() -> None:
    scheduler = Scheduler(batch_groups=100, group_size=2, max_tokens=100)
    assert fill(scheduler, tokens_each=20) == 2
    assert scheduler.refusal(buffered_groups=0, tokens_each=20) is Refusal.TOKENS
    alone = Scheduler(batch_groups=100, group_size=2, max_tokens=100)
    assert fill(alone, tokens_each=1000) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_groups": 0},
        {"group_size": 0},
        {"depth": -1},
        {"updates_per_batch": 0},
        {"max_trajectories": 3},
        {"max_tokens": 0},
    ],
)
def test_bad_bounds_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidFieldError, match=next(iter(bad))):
        Scheduler(**({"batch_groups": 4, "group_size": 4} | bad))


def test_versions_go_forward_and_engines_never_lead() -> None:
    scheduler = Scheduler(batch_groups=1, group_size=1)
    scheduler.set_versions(engine=2, next_train=2)
    with pytest.raises(InvalidFieldError, match="never go back"):
        scheduler.set_versions(engine=1)
    with pytest.raises(InvalidFieldError, match="already serve"):
        scheduler.set_versions(engine=4)
    scheduler.set_versions(next_train=3)
    scheduler.set_versions(next_train=2)  # a batch was given back


def test_a_group_starts_once() -> None:
    scheduler = Scheduler(batch_groups=4, group_size=1)
    scheduler.start(0, tokens_each=1)
    with pytest.raises(InvalidFieldError, match="in flight"):
        scheduler.start(0, tokens_each=1)


class SchedulerMachine(RuleBasedStateMachine):
    """Against a model: which members of which groups run, and the version each started under."""

    @initialize(
        batch=st.integers(1, 4),
        size=st.integers(1, 3),
        depth=st.integers(0, 3),
        limit=st.none() | st.integers(0, 6),
        tokens=st.none() | st.integers(1, 60),
        granularity=st.sampled_from(Granularity),
    )
    def begin(self, batch, size, depth, limit, tokens, granularity) -> None:
        self.batch, self.size, self.depth = batch, size, depth
        self.limit = None if limit is None else size + limit
        self.tokens = tokens
        self.granularity = granularity
        self.scheduler = Scheduler(
            batch_groups=batch,
            group_size=size,
            depth=depth,
            max_trajectories=self.limit,
            max_tokens=tokens,
            granularity=granularity,
        )
        self.running: dict[int, int] = {}  # members that still run
        self.each: dict[int, int] = {}
        self.buffered: list[int] = []  # version at start, oldest first
        self.started_at: dict[int, int] = {}
        self.engine = self.train = 0
        self.next = 0

    @rule(tokens_each=st.integers(1, 20))
    def start(self, tokens_each: int) -> None:
        if self.scheduler.refusal(buffered_groups=len(self.buffered), tokens_each=tokens_each) is None:
            self.scheduler.start(self.next, tokens_each=tokens_each)
            self.running[self.next] = self.size
            self.each[self.next] = tokens_each
            self.started_at[self.next] = self.engine
            self.next += 1

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def member(self, data) -> None:
        index = data.draw(st.sampled_from([i for i, n in self.running.items() if n]))
        self.scheduler.member_done(index)
        self.running[index] -= 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kept=st.booleans())
    def finish(self, data, kept) -> None:
        index = data.draw(st.sampled_from(list(self.running)))
        self.scheduler.group_done(index)
        del self.running[index]
        if kept:
            self.buffered.append(self.started_at[index])

    @precondition(lambda self: len(self.buffered) >= self.batch)
    @rule()
    def collect_oldest(self) -> None:
        self.buffered.sort()
        del self.buffered[: self.batch]
        self.train += 1
        self.scheduler.set_versions(next_train=self.train)

    @precondition(lambda self: self.engine < self.train)
    @rule()
    def publish(self) -> None:
        self.engine += 1
        self.scheduler.set_versions(engine=self.engine)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        alive = {i: (n if self.granularity is Granularity.SAMPLE else self.size) for i, n in self.running.items()}
        assert self.scheduler.trajectories_in_flight == sum(alive.values())
        assert self.scheduler.tokens_in_flight == sum(n * self.each[i] for i, n in alive.items())
        assert self.scheduler.groups_in_flight == len(self.running)
        if self.limit is not None:
            assert self.scheduler.trajectories_in_flight <= self.limit

    @invariant()
    def staleness_is_bounded_by_depth_when_nothing_straggles(self) -> None:
        # Whatever is outstanding, taken oldest first, would be trained at most `depth` updates after it began,
        # as long as no younger group overtook it; the machine collects by age, so this holds at every moment
        # for groups that are ready.
        if hasattr(self, "scheduler"):
            outstanding = len(self.running) + len(self.buffered)
            assert outstanding <= self.batch * (self.depth + 1)


TestScheduler = SchedulerMachine.TestCase
