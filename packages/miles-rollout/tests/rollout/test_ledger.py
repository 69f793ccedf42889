"""No prompt is lost, none is in two places, and no attempt number is used twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_contracts import InvalidFieldError
from miles_rollout.ledger import Fate, Issue, Ledger, UnusedPolicy


def test_retry_until_the_budget_is_spent() -> None:
    ledger = Ledger(on_failure=UnusedPolicy.RETRY, max_retries=2, stride=3)
    ledger.begin_fresh(7)
    assert ledger.failed(7) is Fate.RETRIED
    assert ledger.begin_waiting() == Issue(prompt_index=7, attempt=3, retries=1)
    assert ledger.failed(7) is Fate.RETRIED
    assert ledger.begin_waiting() == Issue(prompt_index=7, attempt=6, retries=2)
    assert ledger.failed(7) is Fate.GIVEN_UP
    assert ledger.begin_waiting() is None


def test_policies_are_apart() -> None:
    ledger = Ledger(on_failure=UnusedPolicy.DROP, on_stale=UnusedPolicy.RETRY)
    ledger.begin_fresh(0)
    assert ledger.failed(0) is Fate.DROPPED
    ledger.begin_fresh(1)
    ledger.kept(1)
    assert ledger.stale(1) is Fate.RETRIED


def test_in_flight_is_issued_again_first_with_the_same_attempt() -> None:
    ledger = Ledger(on_failure=UnusedPolicy.RETRY)
    for index in range(4):
        ledger.begin_fresh(index)
    ledger.failed(0)
    ledger.kept(2)
    again, kept = ledger.state()
    assert [(i.prompt_index, i.attempt) for i in again] == [(1, 0), (3, 0), (0, 1)]
    assert [i.prompt_index for i in kept] == [2]


@pytest.mark.parametrize("bad", [{"max_retries": -1}, {"stride": 0}])
def test_bad_limits_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidFieldError):
        Ledger(**bad)


def test_a_repeated_ordinal_is_refused() -> None:
    ledger = Ledger(on_failure=UnusedPolicy.RETRY)
    ledger.begin_fresh(0)
    with pytest.raises(InvalidFieldError, match="twice"):
        ledger.begin_fresh(0)
    ledger.failed(0)
    with pytest.raises(InvalidFieldError, match="twice"):
        ledger.begin_fresh(0)


def test_restore_only_into_a_fresh_ledger() -> None:
    ledger = Ledger()
    ledger.begin_fresh(0)
    with pytest.raises(InvalidFieldError, match="before the worker starts"):
        ledger.restore((), ())


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        failure=st.sampled_from(UnusedPolicy),
        stale=st.sampled_from(UnusedPolicy),
        retries=st.integers(0, 3),
        stride=st.integers(1, 3),
    )
    def begin(self, failure, stale, retries, stride) -> None:
        self.args = {"on_failure": failure, "on_stale": stale, "max_retries": retries, "stride": stride}
        self.ledger = Ledger(**self.args)
        self.next = 0
        self.flying: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.gone: set[int] = set()
        self.tries: dict[int, list[int]] = {}
        self.waiting: set[int] = set()

    @rule()
    def fresh(self) -> None:
        issue = self.ledger.begin_fresh(self.next)
        self._began(issue)
        self.next += 1

    @rule()
    def again(self) -> None:
        issue = self.ledger.begin_waiting()
        assert (issue is None) == (not self.waiting)
        if issue is not None:
            self.waiting.remove(issue.prompt_index)
            self._began(issue)

    def _began(self, issue: Issue) -> None:
        self.flying[issue.prompt_index] = issue.attempt
        self.tries.setdefault(issue.prompt_index, []).append(issue.attempt)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), what=st.sampled_from(["kept", "failed", "filtered"]))
    def end(self, data, what) -> None:
        index = data.draw(st.sampled_from(list(self.flying)))
        attempt = self.flying.pop(index)
        if what == "kept":
            self.ledger.kept(index)
            self.kept[index] = attempt
        elif what == "filtered":
            self.ledger.finished(index)
            self.gone.add(index)
        else:
            self._unused(index, self.ledger.failed(index), self.args["on_failure"])

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), trained=st.booleans())
    def leave(self, data, trained) -> None:
        index = data.draw(st.sampled_from(list(self.kept)))
        del self.kept[index]
        if trained:
            self.ledger.finished(index)
            self.gone.add(index)
        else:
            self._unused(index, self.ledger.stale(index), self.args["on_stale"])

    def _unused(self, index: int, fate: Fate, policy: UnusedPolicy) -> None:
        tries = len(self.tries[index])
        if policy is UnusedPolicy.DROP:
            assert fate is Fate.DROPPED
        else:
            assert fate is (Fate.RETRIED if tries <= self.args["max_retries"] else Fate.GIVEN_UP)
        (self.waiting if fate is Fate.RETRIED else self.gone).add(index)

    @rule()
    def kill_and_resume(self) -> None:
        again, kept = self.ledger.state()
        self.ledger = Ledger(**self.args)
        self.ledger.restore(again, kept)
        for index, attempt in self.flying.items():
            assert self.tries[index].pop() == attempt  # the same attempt will be issued again
        self.waiting |= self.flying.keys()
        self.flying = {}

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        again, kept = self.ledger.state()
        places = [i.prompt_index for i in (*again, *kept)] + list(self.gone)
        assert sorted(places) == list(range(self.next))
        assert all(len(set(t)) == len(t) for t in self.tries.values())
        gaps = [b - a for t in self.tries.values() for a, b in itertools.pairwise(t)]
        assert all(g == self.args["stride"] for g in gaps)


TestLedger = LedgerMachine.TestCase
