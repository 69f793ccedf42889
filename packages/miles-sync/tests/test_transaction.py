"""The guarantee of the transaction, over every way in which its requests can go wrong."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_sync import Answer, Decision, Phase, Transaction

NEW = 5
FATES = (
    "done",  # executed and answered
    "refused",  # not executed, answered
    "lost before",  # the request never came
    "lost after",  # executed, the answer never came
    "dies before",
    "dies after",
)


@dataclass
class Model:
    """An engine as the transaction's rules describe it.

    A commit may be slow: it is executed any number of rounds after its caller gave up. Every other request is
    executed before a later one of the same engine is answered, or never.
    """

    content: str
    version: int | None
    can_revert: bool
    alive: bool = True
    paused: bool = False
    staged: bool = False
    closed: bool = False
    slow_commit: bool = False
    old: tuple[str, int | None] | None = None

    def execute(self, phase: Phase) -> None:
        if not self.alive:
            return
        if phase is Phase.PAUSE:
            self.paused = True
        elif phase is Phase.BEGIN:
            self.staged = not self.closed
        elif phase is Phase.COMMIT and self.staged:
            self.old = (self.content, self.version)
            self.content, self.version, self.staged = "new", NEW, False
        elif phase is Phase.ROLLBACK:
            self.staged, self.closed = False, True
            if self.can_revert and self.old is not None:
                (self.content, self.version), self.old = self.old, None
        elif phase in (Phase.RESUME, Phase.CANARY):
            self.paused = False

    def finish_slow_commit(self) -> None:
        if self.slow_commit:
            self.slow_commit = False
            self.execute(Phase.COMMIT)

    def request(self, phase: Phase, fate: str) -> Answer:
        if fate == "dies before":
            self.alive = False
        if not self.alive:
            return Answer(ok=False)
        if fate == "lost before":
            return Answer(ok=False)
        if fate == "slow":
            self.slow_commit = True
            return Answer(ok=False)
        if fate == "refused":
            if phase is Phase.CANARY:
                self.execute(phase)
            return Answer(ok=False, refused=True)
        if phase is Phase.COMMIT and not self.staged:
            return Answer(ok=False, refused=True)
        self.execute(phase)
        version = self.version
        if fate == "dies after":
            self.alive = False
        return Answer(ok=fate == "done", version=version)


def fates_of(model: Model, phase: Phase) -> tuple[str, ...]:
    if not model.alive:
        return ("done",)
    return (*FATES, "slow") if phase is Phase.COMMIT else FATES


@dataclass
class World:
    """A transaction and the engines it talks to."""

    transaction: Transaction
    engines: dict[str, Model]
    uniform: bool

    @classmethod
    def start(cls, befores: list[int | None], can_revert: list[bool], canary: bool) -> World:
        engines = {
            f"e{i}": Model(content=f"old {v}", version=v, can_revert=r)
            for i, (v, r) in enumerate(zip(befores, can_revert, strict=True))
        }
        return cls(Transaction(list(engines), NEW, canary=canary), engines, len(set(befores)) == 1)

    def copy(self) -> World:
        """An independent copy; much faster than `deepcopy`, which the exhaustive search would drown in."""
        transaction = copy.copy(self.transaction)
        for name, value in vars(transaction).items():
            if isinstance(value, set | dict | list):
                setattr(transaction, name, value.copy())
        return World(transaction, {e: copy.copy(m) for e, m in self.engines.items()}, self.uniform)

    def key(self) -> tuple[object, ...]:
        t = self.transaction
        internal = [frozenset(getattr(t, n)) for n in ("_refused", "_committed", "_rolled_back", "_settled")]
        return (
            *(t.phase, t.decision, t.serving, tuple(t.before.items()), t._commit_asked, *internal),
            *(tuple(vars(m).items()) for m in self.engines.values()),
        )

    def step(self, fates: dict[str, str], finish: tuple[str, ...]) -> None:
        """One round; the slow commits of `finish` end in it, after its requests."""
        phase = self.transaction.phase
        answers = {e: self.engines[e].request(phase, fates[e]) for e in self.transaction.targets}
        for name in finish:
            self.engines[name].finish_slow_commit()
        self.transaction.advance(answers)

    def check(self) -> None:
        """The invariants, at the end or where the driver is killed."""
        transaction = self.transaction
        for model in self.engines.values():
            model.finish_slow_commit()
        touched = any(m.paused or m.closed or m.staged or m.content == "new" for m in self.engines.values())
        if transaction.phase is Phase.DONE and touched:
            serving = {self.engines[e].content for e in transaction.serving if self.engines[e].alive}
            assert len(serving) <= 1
            if transaction.decision is Decision.FORWARD:
                assert serving <= {"new"}
            else:
                assert "new" not in serving
            assert set(transaction.serving) | set(transaction.fenced) == set(self.engines)
            assert all(any(f.engine == e for f in transaction.faults) for e in transaction.fenced)
        if self.uniform:
            running = {m.content for m in self.engines.values() if m.alive and not m.paused}
            assert len(running) <= 1


@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("befores", [[4, 4], [NEW, NEW], [4, None]], ids=str)
@pytest.mark.parametrize("can_revert", [[True, True], [True, False]], ids=["revertible", "one is not"])
def test_no_interruption_of_two_engines_leaves_a_mixed_fleet(
    befores: list[int | None], can_revert: list[bool], canary: bool
) -> None:
    """Every fate of every request in every round, and the sender's and the driver's death anywhere: exhaustive."""
    waiting = [World.start(befores, can_revert, canary)]
    seen: set[tuple[object, ...]] = set()
    ends = 0
    while waiting:
        world = waiting.pop()
        if world.key() in seen:
            continue
        seen.add(world.key())
        world.copy().check()
        if world.transaction.phase is Phase.DONE:
            ends += 1
            continue
        failed = world.copy()
        failed.transaction.fail("the sender died")
        waiting.append(failed)
        targets = world.transaction.targets
        slow = [e for e, m in world.engines.items() if m.slow_commit]
        for fates in itertools.product(*(fates_of(world.engines[e], world.transaction.phase) for e in targets)):
            for finish in itertools.chain([()], [tuple(slow)] if slow else [], [(e,) for e in slow]):
                after = world.copy()
                after.step(dict(zip(targets, fates, strict=True)), finish)
                waiting.append(after)
    assert ends > 5


versions = st.sampled_from([None, 0, 4, NEW])


@settings(max_examples=300, deadline=None)
@given(data=st.data(), befores=st.lists(versions, min_size=1, max_size=4), canary=st.booleans(), rarely=st.booleans())
def test_no_interruption_of_any_fleet_leaves_it_mixed(
    data: st.DataObject, befores: list[int | None], canary: bool, rarely: bool
) -> None:
    world = World.start(befores, [data.draw(st.booleans()) for _ in befores], canary)
    for _ in range(15):
        phase = world.transaction.phase
        if phase is Phase.DONE or data.draw(st.integers(0, 30), label="driver") == 0:
            break
        if data.draw(st.integers(0, 20), label="sender") == 0:
            world.transaction.fail("the sender died")
            continue
        fates = {}
        for name in world.transaction.targets:
            usual = ("done",) * (30 if rarely else 3)
            fates[name] = data.draw(st.sampled_from((*fates_of(world.engines[name], phase), *usual)), label=name)
        slow = [e for e, m in world.engines.items() if m.slow_commit]
        world.step(fates, tuple(e for e in slow if data.draw(st.booleans())))
    else:
        assert world.transaction.phase is Phase.DONE, "the transaction does not end"
    world.check()


@given(befores=st.lists(versions, min_size=1, max_size=4), canary=st.booleans())
def test_undisturbed_every_engine_gets_the_new_version(befores: list[int | None], canary: bool) -> None:
    world = World.start(befores, [False] * len(befores), canary)
    while world.transaction.phase is not Phase.DONE:
        world.step(dict.fromkeys(world.engines, "done"), ())
    assert world.transaction.decision is Decision.FORWARD
    assert world.transaction.serving == tuple(world.engines)
    assert not world.transaction.fenced
    assert not world.transaction.faults
    assert all(m.content == "new" and not m.paused for m in world.engines.values())


def answer_all(transaction: Transaction, **special: Answer) -> None:
    version = NEW if transaction.decision is not Decision.BACK else 0
    if transaction.phase is Phase.INSPECT:
        version = 0
    usual = Answer(ok=True, version=version)
    transaction.advance({e: special.get(e, usual) for e in transaction.targets})


def until(phase: Phase, *, canary: bool = False) -> Transaction:
    transaction = Transaction(["a", "b"], NEW, canary=canary)
    while transaction.phase is not phase:
        answer_all(transaction)
    return transaction


def test_a_lost_commit_answer_is_settled_by_the_version() -> None:
    transaction = until(Phase.COMMIT)
    answer_all(transaction, b=Answer(ok=False, reason="connection reset"))
    assert transaction.phase is Phase.CONFIRM
    answer_all(transaction)
    answer_all(transaction)
    assert transaction.serving == ("a", "b")
    assert transaction.decision is Decision.FORWARD


def test_when_every_commit_answer_is_lost_the_versions_decide() -> None:
    transaction = until(Phase.COMMIT)
    lost = Answer(ok=False, reason="connection reset")
    answer_all(transaction, a=lost, b=lost)
    answer_all(transaction)
    assert transaction.decision is Decision.FORWARD


def test_an_engine_that_says_committed_and_reports_another_version_is_fenced() -> None:
    transaction = until(Phase.CONFIRM)
    answer_all(transaction, b=Answer(ok=True, version=3))
    assert transaction.targets == ("a",)
    assert "it reports 3" in transaction.faults[0].reason


def test_one_committed_engine_takes_the_fleet_forward_and_fences_the_other() -> None:
    transaction = until(Phase.COMMIT)
    answer_all(transaction, b=Answer(ok=False, refused=True, reason="out of memory"))
    answer_all(transaction, b=Answer(ok=True, version=0))
    assert transaction.targets == ("a",)
    answer_all(transaction)
    assert (transaction.serving, transaction.fenced) == (("a",), ("b",))
    assert transaction.faults[0].reason == "out of memory"


def test_when_all_refuse_the_commit_the_old_version_goes_on_everywhere() -> None:
    transaction = until(Phase.COMMIT)
    no = Answer(ok=False, refused=True, reason="tensor incomplete", tensor="w")
    answer_all(transaction, a=no, b=no)
    assert transaction.phase is Phase.ROLLBACK
    while transaction.phase is not Phase.DONE:
        answer_all(transaction)
    assert transaction.serving == ("a", "b")
    assert transaction.decision is Decision.BACK
    assert transaction.faults[0].tensor == "w"


def test_a_wrong_canary_pauses_everybody_before_it_rolls_back() -> None:
    transaction = until(Phase.CANARY, canary=True)
    answer_all(transaction, b=Answer(ok=False, refused=True, reason="the policy did not change"))
    assert transaction.phase is Phase.PAUSE
    answer_all(transaction)
    assert transaction.phase is Phase.ROLLBACK


def test_an_inspection_that_fails_touches_nobody() -> None:
    transaction = Transaction(["a", "b"], NEW)
    answer_all(transaction, a=Answer(ok=False, reason="unreachable"))
    assert transaction.phase is Phase.DONE
    assert transaction.fenced == ("a",)


def test_refuses_an_empty_fleet_a_double_name_and_a_missing_answer() -> None:
    with pytest.raises(InvalidFieldError, match="at least one engine"):
        Transaction([], 1)
    with pytest.raises(InvalidFieldError, match="every engine once"):
        Transaction(["a", "a"], 1)
    with pytest.raises(InvalidFieldError, match=r"missing \['b'\]"):
        Transaction(["a", "b"], 1).advance({"a": Answer(ok=True)})
