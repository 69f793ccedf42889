"""Sessions stick, new ones go where least is outstanding, and the counts never drift."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_contracts import InvalidFieldError
from miles_rollout.router import Placement, RouterTable


def test_new_sessions_go_to_the_least_loaded_and_stay() -> None:
    table = RouterTable(["a", "b", "c"])
    assert [table.place(k, n) for k, n in (("s1", 100), ("s2", 10), ("s3", 50), ("s4", 1))] == ["a", "b", "c", "b"]
    table.done("a", 100)
    assert table.place("s2", 1000) == "b", "a session stays, however loaded its engine is"
    assert table.place("s5", 1) == "a"


def test_equal_load_is_spread_by_sessions() -> None:
    table = RouterTable(["a", "b"])
    homes = []
    for index in range(6):
        name = table.place(f"s{index}", 10)
        table.done(name, 10)
        homes.append(name)
    assert homes == ["a", "b", "a", "b", "a", "b"]


def test_sessions_of_a_quarantined_engine_move_and_stay_moved() -> None:
    table = RouterTable(["a", "b"])
    assert table.place("s", 5) == "a"
    assert table.quarantine("a", "died")
    assert not table.quarantine("a", "still dead")
    assert table.slots["a"].quarantine == "still dead"
    assert table.place("s", 5) == "b"
    assert table.admit("a")
    assert not table.admit("a")
    assert table.place("s", 5) == "b", "its prefix is cached on b now"


def test_nobody_serves() -> None:
    table = RouterTable(["a"])
    table.quarantine("a", "died")
    assert table.place("s", 5) is None
    assert table.slots["a"].outstanding == 0


def test_a_failed_engine_is_avoided_unless_it_is_the_only_one() -> None:
    table = RouterTable(["a", "b"])
    assert table.place("s", 5) == "a"
    assert table.place("s", 5, avoid="a") == "b"
    table.quarantine("a", "died")
    assert table.place("s", 5, avoid="b") == "b"


def test_random_placement_ignores_affinity() -> None:
    table = RouterTable(["a", "b"], placement=Placement.RANDOM, seed=1)
    assert {table.place("s", 1) for _ in range(30)} == {"a", "b"}
    assert sum(slot.sessions for slot in table.slots.values()) == 1


def test_the_longest_unused_session_is_forgotten() -> None:
    table = RouterTable(["a", "b"], max_sessions=2)
    table.place("s1", 0)
    table.place("s2", 0)
    table.place("s1", 0)
    table.place("s3", 0)
    assert [table.engine_of(k) is not None for k in ("s1", "s2", "s3")] == [True, False, True]


def test_hit_rates_count_only_what_engines_say() -> None:
    table = RouterTable(["a"])
    table.answered("a", prompt_tokens=100, cached_tokens=90)
    table.answered("a", prompt_tokens=100, cached_tokens=None)
    slot = table.slots["a"]
    assert (slot.turns, slot.prompt_tokens, slot.cached_tokens) == (2, 100, 90)


def test_bad_input_is_refused() -> None:
    for engines in ([], ["a", "a"]):
        with pytest.raises(InvalidFieldError, match="engines"):
            RouterTable(engines)
    with pytest.raises(InvalidFieldError, match="max_sessions"):
        RouterTable(["a"], max_sessions=0)
    table = RouterTable(["a"])
    with pytest.raises(InvalidFieldError, match="already"):
        table.add("a", quarantine=None)
    with pytest.raises(InvalidFieldError, match="only 0 are outstanding"):
        table.done("a", 1)


class TableMachine(RuleBasedStateMachine):
    @initialize(engines=st.integers(1, 4), limit=st.integers(1, 6))
    def begin(self, engines, limit) -> None:
        self.names = [f"e{i}" for i in range(engines)]
        self.table = RouterTable(self.names, max_sessions=limit)
        self.limit = limit
        self.turns: list[tuple[str, int]] = []
        self.down: set[str] = set()
        self.home: dict[str, str] = {}

    @rule(key=st.sampled_from("stuvwxyz"), tokens=st.integers(0, 50), data=st.data())
    def place(self, key, tokens, data) -> None:
        avoid = data.draw(st.none() | st.sampled_from(self.names))
        load = {n: sum(t for m, t in self.turns if m == n) for n in self.names}
        before = self.table.engine_of(key)
        chosen = self.table.place(key, tokens, avoid=avoid)
        up = [n for n in self.names if n not in self.down]
        if not up:
            assert chosen is None
            return
        allowed = [n for n in up if n != avoid] or up
        assert chosen in allowed
        if before in allowed:
            assert chosen == before
        else:
            assert load[chosen] == min(load[n] for n in allowed)
        self.turns.append((chosen, tokens))
        assert self.table.engine_of(key) == chosen

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def done(self, data) -> None:
        turn = data.draw(st.sampled_from(self.turns))
        self.turns.remove(turn)
        self.table.done(*turn)

    @rule(data=st.data())
    def down_or_up(self, data) -> None:
        name = data.draw(st.sampled_from(self.names))
        if name in self.down:
            self.down.remove(name)
            self.table.admit(name)
        else:
            self.down.add(name)
            self.table.quarantine(name, "test")

    @rule(key=st.sampled_from("stuvwxyz"))
    def forget(self, key) -> None:
        self.table.forget(key)
        assert self.table.engine_of(key) is None

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        placed = [e for k in "stuvwxyz" if (e := self.table.engine_of(k)) is not None]
        assert len(placed) <= self.limit
        for name, slot in self.table.slots.items():
            assert slot.outstanding == sum(t for n, t in self.turns if n == name)
            assert slot.sessions == placed.count(name)
        assert self.table.serving == [n for n in self.names if n not in self.down]


TestTable = TableMachine.TestCase
