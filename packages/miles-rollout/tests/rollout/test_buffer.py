"""The buffer is bounded, gives the oldest that pass, and every group ends in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_factories import group, trajectory

from miles_contracts import FilterDecision, Group, InvalidFieldError, Status, wire
from miles_rollout.buffer import Entry, GroupBuffer, UnknownVersionPolicy, Verdict
from miles_rollout.filters import reward_variance

PREFIX = "rollout/fully_async/"


def put(buffer: GroupBuffer, *groups: Group, now: float = 0.0) -> None:
    for one in groups:
        assert buffer.judge(one) is None
        buffer.put(one, generation_s=1.0, now=now)


def indices(groups) -> list[int]:
    return [g.prompt_index for g in groups]


def test_oldest_weights_first_then_earliest_arrival_and_ordered_by_prompt() -> None:
    buffer = GroupBuffer(max_groups=10)
    put(buffer, group(9, version=3), group(8, version=1), group(7, version=3), group(1, version=2))
    assert indices(buffer.collect(2, train_version=3, now=0.0).groups) == [1, 8]
    assert indices(buffer.collect(1, train_version=3, now=0.0).groups) == [9]
    assert len(buffer) == 1


def test_nothing_is_taken_while_there_are_fewer() -> None:
    buffer = GroupBuffer(max_groups=10)
    put(buffer, group(0), group(1))
    assert buffer.collect(3, train_version=0, now=0.0).groups == ()
    assert len(buffer) == 2
    assert buffer.leased == 0


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_failed_groups_are_refused_on_arrival(status: Status) -> None:
    dropped = GroupBuffer(max_groups=10).judge(group(0, status=status))
    assert dropped is not None
    assert dropped.verdict is Verdict.FAILED


def test_a_missing_member_is_a_failure_and_the_reason_is_the_members() -> None:
    buffer = GroupBuffer(max_groups=10)
    dropped = buffer.judge(Group(prompt_index=0, size=2, trajectories=(trajectory(0, 0),)))
    assert dropped is not None
    assert (dropped.verdict, dropped.reason) == (Verdict.FAILED, "1 of 2 members, or one was aborted")
    bad = trajectory(0, 1, status=Status.FAILED, error="sandbox gone")
    dropped = buffer.judge(Group(prompt_index=0, size=2, trajectories=(trajectory(0, 0), bad)))
    assert dropped is not None
    assert dropped.reason == "sandbox gone"


def test_the_filter_is_asked_on_arrival_and_its_reason_counted() -> None:
    buffer = GroupBuffer(max_groups=10, group_filter=reward_variance())
    dropped = buffer.judge(group(0, rewards=(1.0, 1.0)))
    assert dropped is not None
    assert (dropped.verdict, dropped.reason) == (Verdict.FILTERED, "zero_reward_variance")
    assert buffer.judge(group(1)) is None
    assert buffer.metrics()["rollout/dynamic_filter/drop_zero_reward_variance"] == 1


def test_a_failed_group_never_reaches_the_filter() -> None:
    def explode(_: Group) -> FilterDecision:
        raise AssertionError("asked")

    buffer = GroupBuffer(max_groups=10, group_filter=explode)
    assert buffer.judge(group(0, status=Status.FAILED)) is not None


def test_a_group_without_a_sampled_token_teaches_nothing() -> None:
    dropped = GroupBuffer(max_groups=10).judge(group(0, length=0))
    assert dropped is not None
    assert (dropped.verdict, dropped.reason) == (Verdict.FILTERED, "nothing_sampled")


def test_staleness_is_measured_against_the_version_that_will_train() -> None:
    buffer = GroupBuffer(max_groups=10, max_staleness=1)
    put(buffer, group(0, version=1), group(1, version=2), group(2, version=3))
    assert indices(buffer.collect(2, train_version=2, now=0.0).groups) == [0, 1]
    buffer.return_leased()
    batch = buffer.collect(2, train_version=3, now=0.0)
    assert [(d.group.prompt_index, d.verdict, d.reason) for d in batch.stale] == [
        (0, Verdict.STALE, "2 updates old, limit 1")
    ]
    assert indices(batch.groups) == [1, 2]


def test_one_old_token_makes_a_group_old() -> None:
    buffer = GroupBuffer(max_groups=10, max_staleness=1)
    mixed = Group(prompt_index=0, size=1, trajectories=(trajectory(0, versions=(4, 2, 4)),))
    put(buffer, mixed)
    assert len(buffer.collect(1, train_version=4, now=0.0).stale) == 1


def test_stale_groups_leave_even_when_no_batch_comes_of_it() -> None:
    buffer = GroupBuffer(max_groups=10, max_staleness=0)
    put(buffer, group(0, version=0), group(1, version=1))
    batch = buffer.collect(2, train_version=1, now=0.0)
    assert (indices(batch.groups), indices(d.group for d in batch.stale)) == ([], [0])
    assert len(buffer) == 1


def test_unknown_versions_are_never_fresh() -> None:
    refusing = GroupBuffer(max_groups=10, max_staleness=0)
    dropped = refusing.judge(group(0, version=None))
    assert dropped is not None
    assert dropped.verdict is Verdict.UNKNOWN_VERSION
    partly = Group(prompt_index=0, size=1, trajectories=(trajectory(0, versions=(5, None)),))
    assert refusing.judge(partly) is not None
    assert refusing.metrics()[PREFIX + "unknown_version_groups_filtered"] == 2

    keeping = GroupBuffer(max_groups=10, max_staleness=0, unknown_version=UnknownVersionPolicy.KEEP)
    put(keeping, group(1, version=7), group(2, version=None))
    assert indices(keeping.collect(1, train_version=7, now=0.0).groups) == [2]
    metrics = keeping.metrics()
    assert metrics[PREFIX + "unknown_version_groups_consumed"] == 1
    assert PREFIX + "avg_staleness" not in metrics


def test_bounded_in_groups_and_bytes() -> None:
    one = group(0)
    buffer = GroupBuffer(max_groups=3, max_bytes=2 * one.num_bytes)
    put(buffer, one)
    assert buffer.has_room(group(1))
    put(buffer, group(1))
    assert buffer.num_bytes == 2 * one.num_bytes
    assert not buffer.has_room(group(2))
    assert buffer.has_room(group(2), demand=3), "a trainer that waits for three must not starve"
    put(buffer, group(2))
    assert not buffer.has_room(group(3), demand=9), "the bound of groups holds always"
    with pytest.raises(InvalidFieldError, match="full"):
        buffer.put(group(3), generation_s=0.0, now=0.0)


def test_a_group_larger_than_the_buffer_goes_into_an_empty_one() -> None:
    buffer = GroupBuffer(max_groups=3, max_bytes=1)
    assert buffer.has_room(group(0))


def test_confirm_exactly_once() -> None:
    buffer = GroupBuffer(max_groups=3)
    put(buffer, group(0))
    batch = buffer.collect(1, train_version=0, now=0.0)
    assert indices(e.group for e in buffer.state()) == [0], "leased groups are not trained yet"
    buffer.confirm(batch.groups)
    assert buffer.state() == ()
    with pytest.raises(InvalidFieldError, match="trained twice"):
        buffer.confirm(batch.groups)


def test_state_survives_the_wire() -> None:
    buffer = GroupBuffer(max_groups=5)
    put(buffer, group(3, version=1), group(1, version=0), group(2, version=2))
    buffer.collect(1, train_version=2, now=0.0)
    state = wire.decode(wire.encode(buffer.state()), tuple[Entry, ...])
    again = GroupBuffer(max_groups=5)
    again.restore(state, now=100.0)
    assert indices(e.group for e in again.state()) == [3, 1, 2]
    assert indices(again.collect(3, train_version=2, now=100.0).groups) == [1, 2, 3]
    with pytest.raises(InvalidFieldError, match="restore before"):
        again.restore(state, now=0.0)


def test_figures_are_of_consumed_groups_only() -> None:
    buffer = GroupBuffer(max_groups=10, max_staleness=2)
    put(buffer, group(0, version=0), group(1, version=3), group(2, version=4), group(3, version=5), now=10.0)
    buffer.judge(group(4, status=Status.FAILED))
    buffer.collect(2, train_version=5, engine_version=4, now=14.0)
    metrics = buffer.metrics()
    expected = {
        "queue_size": 1,
        "aborted_groups_filtered": 1,
        "stale_groups_filtered": 1,
        "avg_staleness": 1.5,  # versions 3 and 4 at train version 5; the dropped one was 5 old
        "max_staleness": 2,
        "buffer_avg_staleness": 0.0,
        "buffer_max_staleness": 0,
        "generation_span": 0.0,
        "queue_wait": 0.5,
        "publish_lag": 1.0,
        "generation_seconds": 1.0,
        "queue_wait_seconds": 4.0,
        "wasted_tokens": 12,
    }
    assert {k: metrics[PREFIX + k] for k in expected} == expected
    assert metrics[PREFIX + "generation_span"] + 0.5 + 1.0 == metrics[PREFIX + "avg_staleness"]
    empty = buffer.metrics()
    assert empty[PREFIX + "stale_groups_filtered"] == 0
    assert PREFIX + "avg_staleness" not in empty


def test_versions_of_consumed_trajectories() -> None:
    buffer = GroupBuffer(max_groups=10)
    members = (trajectory(0, 0, versions=(3, 4)), trajectory(0, 1, versions=(5, 5)))
    put(buffer, Group(prompt_index=0, size=2, trajectories=members), group(1, version=6))
    buffer.collect(1, train_version=6, now=0.0)
    metrics = buffer.metrics()
    figures = {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("rollout/weight_version/")}
    assert figures == {"mean": 4.0, "min": 3, "max": 5, "mixed_version_ratio": 0.5}


def test_bias_report_compares_dropped_with_trained() -> None:
    buffer = GroupBuffer(max_groups=10, max_staleness=0)
    put(buffer, group(0, version=1, length=2, rewards=(1.0, 1.0)), group(1, version=0, length=8, rewards=(0.0, 0.5)))
    buffer.collect(1, train_version=1, now=0.0)
    metrics = buffer.metrics()
    assert metrics["rollout/bias/trained_length"] == 2
    assert metrics["rollout/bias/dropped_length"] == 8
    assert metrics["rollout/bias/trained_reward"] == 1.0
    assert metrics["rollout/bias/dropped_reward"] == 0.25


@pytest.mark.parametrize("bad", [{"max_groups": 0}, {"max_bytes": 0}, {"max_staleness": -1}])
def test_bad_bounds_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidFieldError, match=next(iter(bad))):
        GroupBuffer(**({"max_groups": 2} | bad))


@pytest.mark.parametrize("count", [0, 3])
def test_a_batch_that_cannot_come_is_refused(count: int) -> None:
    with pytest.raises(InvalidFieldError, match="count"):
        GroupBuffer(max_groups=2).collect(count, train_version=0, now=0.0)


class BufferMachine(RuleBasedStateMachine):
    """Against a model in plain lists."""

    @initialize(
        max_groups=st.integers(1, 6),
        max_bytes=st.none() | st.integers(1, 2000),
        max_staleness=st.none() | st.integers(0, 3),
    )
    def begin(self, max_groups, max_bytes, max_staleness) -> None:
        self.args = {"max_groups": max_groups, "max_bytes": max_bytes, "max_staleness": max_staleness}
        self.buffer = GroupBuffer(**self.args)
        self.waiting: list[Group] = []
        self.leased: list[Group] = []
        self.done: set[int] = set()
        self.dropped = {"failed": 0, "stale": 0}
        self.consumed: list[int] = []
        self.version = self.next = 0

    @rule(failed=st.booleans(), length=st.integers(1, 9), behind=st.integers(0, 3))
    def arrive(self, failed, length, behind) -> None:
        version = max(0, self.version - behind)
        one = group(self.next, version=version, length=length, status=Status.FAILED if failed else Status.FINISHED)
        if not self.buffer.has_room(one):
            full = len(self.waiting) >= self.args["max_groups"]
            held = sum(g.num_bytes for g in self.waiting)
            assert full or held + one.num_bytes > self.args["max_bytes"]
            return
        self.next += 1
        if self.buffer.judge(one) is not None:
            assert failed
            self.dropped["failed"] += 1
            self.done.add(one.prompt_index)
            return
        self.buffer.put(one, generation_s=0.0, now=0.0)
        self.waiting.append(one)

    @rule()
    def update(self) -> None:
        self.version += 1

    @precondition(lambda self: self.buffer is not None)
    @rule(data=st.data())
    def collect(self, data) -> None:
        count = data.draw(st.integers(1, self.args["max_groups"]))
        batch = self.buffer.collect(count, train_version=self.version, now=0.0)
        limit = self.args["max_staleness"]
        old = [g for g in self.waiting if limit is not None and self.version - g.oldest_version > limit]
        assert sorted(indices(d.group for d in batch.stale)) == sorted(indices(old))
        self.waiting = [g for g in self.waiting if g not in old]
        self.done |= set(indices(old))
        self.dropped["stale"] += len(old)
        if len(self.waiting) < count:
            assert batch.groups == ()
            return
        oldest = sorted(self.waiting, key=lambda g: g.oldest_version)[:count]
        assert sorted(indices(batch.groups)) == indices(batch.groups)
        assert sorted(indices(batch.groups)) == sorted(indices(oldest))
        self.waiting = [g for g in self.waiting if g not in oldest]
        self.leased += oldest
        self.consumed += [self.version - g.oldest_version for g in oldest]

    @precondition(lambda self: self.leased)
    @rule()
    def train(self) -> None:
        self.buffer.confirm(self.leased)
        self.done |= set(indices(self.leased))
        self.leased = []

    @rule()
    def kill_and_resume(self) -> None:
        self._check_figures()
        entries = self.buffer.state()
        self.buffer = GroupBuffer(**self.args)
        self.buffer.restore(entries, now=0.0)
        self.waiting = [e.group for e in entries]
        self.leased = []

    @rule()
    def report(self) -> None:
        self._check_figures()

    def _check_figures(self) -> None:
        metrics = self.buffer.metrics()
        assert metrics[PREFIX + "queue_size"] == len(self.waiting)
        assert metrics[PREFIX + "aborted_groups_filtered"] == self.dropped["failed"]
        assert metrics[PREFIX + "stale_groups_filtered"] == self.dropped["stale"]
        if self.consumed:
            assert metrics[PREFIX + "max_staleness"] == max(self.consumed)
            assert metrics[PREFIX + "avg_staleness"] == pytest.approx(sum(self.consumed) / len(self.consumed))
            if self.args["max_staleness"] is not None:
                assert max(self.consumed) <= self.args["max_staleness"]
        self.dropped, self.consumed = {"failed": 0, "stale": 0}, []

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert len(self.buffer) == len(self.waiting)
        assert self.buffer.num_bytes == sum(g.num_bytes for g in self.waiting)
        here = indices(e.group for e in self.buffer.state())
        assert sorted(here) == sorted(indices(self.waiting) + indices(self.leased))
        assert sorted([*here, *self.done]) == list(range(self.next))


TestBuffer = BufferMachine.TestCase
