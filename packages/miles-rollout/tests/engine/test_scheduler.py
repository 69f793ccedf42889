"""The scheduler as a state machine: an imaginary model that remembers what every slot was computed from.

Whatever comes in whatever order, a sequence only ever reads slots that hold its own prefix, computed under weights
it may use; slots are conserved; everybody finishes.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_rollout.engine.scheduler import Chunk, Limits, Scheduler
from miles_rollout.engine.sequence import Finish, Sampling, Sequence, State


def make(prompt: list[int], new: int, name: str = "s") -> Sequence:
    tokens = np.zeros(len(prompt) + new, dtype=np.int32)
    tokens[: len(prompt)] = prompt
    return Sequence(id=name, tokens=tokens, prompt_length=len(prompt), sampling=Sampling(max_new_tokens=new, seed=0))


class ImaginaryModel:
    """Runs chunks on a table `slot -> (prefix, epoch)` instead of tensors, and checks every read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cells: dict[int, tuple[tuple[int, ...], int]] = {}
        self.epoch = 0
        self.fed = 0

    def step(self) -> list[Chunk]:
        scheduler = self.scheduler
        chunks = scheduler.next_step()
        written: set[int] = set()
        for chunk in chunks:
            s = chunk.sequence
            assert chunk.count >= 1
            assert s.state is State.RUNNING
            row = scheduler.table.slots[s.row]
            for position in range(chunk.start, chunk.start + chunk.count):
                slot = int(row[position])
                assert slot != 0
                assert slot not in written, "two tokens of a step in one slot"
                written.add(slot)
                self.cells[slot] = (tuple(s.tokens[: position + 1].tolist()), self.epoch)
            self.fed += chunk.count
        for chunk in chunks:
            s = chunk.sequence
            end = chunk.start + chunk.count
            for position, slot in enumerate(scheduler.table.slots[s.row, :end].tolist()):
                prefix, epoch = self.cells[slot]
                assert prefix == tuple(s.tokens[: position + 1].tolist())
                if s.clean:
                    assert epoch == self.epoch, "old weights' keys in a clean sequence"
            assert not scheduler.table.slots[s.row, end:].any()
        scheduler.computed(chunks)
        for chunk in chunks:
            s = chunk.sequence
            if s.state is State.RUNNING and s.computed == s.length:
                token = random.Random(f"{s.id}-{s.num_new}").randrange(3)
                s.append(token, -1.0, str(self.epoch))
                if s.finish is not None:
                    scheduler.finish(s)
        return chunks

    def new_weights(self, in_place: bool) -> None:
        if not in_place:
            self.scheduler.retract_all()
        self.scheduler.weights_changed()
        self.epoch += 1

    def drain(self, most: int = 5000) -> None:
        self.scheduler.paused = False
        for _ in range(most):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            assert self.step(), "work is waiting but nothing runs"
        raise AssertionError("sequences do not finish")


def check_slots(scheduler: Scheduler) -> None:
    """Every slot is free, in the tree, or held by exactly one running sequence."""
    own = sum(s.held - s.owned for s in scheduler.running)
    assert scheduler.allocator.free_count + scheduler.tree.size + own == scheduler.limits.kv_tokens


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(0, 8)),
        st.tuples(st.just("steps"), st.integers(1, 6), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 7), st.none()),
        st.tuples(st.just("weights"), st.booleans(), st.none()),
        st.tuples(st.just("pause"), st.booleans(), st.none()),
        st.tuples(st.just("resume"), st.none(), st.none()),
        st.tuples(st.just("flush"), st.none(), st.none()),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(events, st.sampled_from([24, 40, 200]), st.sampled_from([1, 4, 16]), st.booleans())
def test_any_history_is_correct_and_ends(steps: list[tuple], kv: int, budget: int, sharing: bool) -> None:
    limits = Limits(kv_tokens=kv, context_length=20, max_running=6, step_tokens=budget, min_shared=1, headroom=1)
    scheduler = Scheduler(limits, sharing=sharing)
    model = ImaginaryModel(scheduler)
    added: list[Sequence] = []
    for name, first, second in steps:
        if name == "add":
            sequence = make(first, max(second, 1), str(len(added)))
            added.append(sequence)
            scheduler.add(sequence)
        elif name == "steps":
            for _ in range(first):
                model.step()
        elif name == "abort" and added:
            victim = added[first % len(added)]
            if victim.state is not State.FINISHED:
                scheduler.finish(victim, Finish("abort", "test"))
        elif name == "weights":
            model.new_weights(in_place=first)
        elif name == "pause":
            scheduler.paused = True
            if first:
                scheduler.retract_all()
        elif name == "resume":
            scheduler.paused = False
        elif name == "flush":
            scheduler.flush()
    model.drain()
    assert all(s.state is State.FINISHED for s in added)
    for s in added:
        assert s.finish is not None
        if s.finish.kind != "abort":
            assert s.num_new == s.sampling.max_new_tokens
        assert sum(end - start for _, start, end in s.versions) == s.num_new
    assert scheduler.tree.evictable == scheduler.tree.size
    scheduler.flush()
    assert scheduler.allocator.free_count == kv
    assert not scheduler.table.slots.any()


def test_slots_are_conserved_step_by_step() -> None:
    scheduler = Scheduler(Limits(kv_tokens=40, context_length=30, max_running=8, step_tokens=8, headroom=0))
    model = ImaginaryModel(scheduler)
    draw = random.Random(1)
    for i in range(40):
        scheduler.add(make([draw.randrange(9) for _ in range(draw.randrange(1, 12))], draw.randrange(1, 19), str(i)))
        model.step()
        check_slots(scheduler)
    model.drain()
    assert scheduler.retracted > 0, "the test is meant to run out of slots"


def test_siblings_that_arrive_together_compute_the_prompt_once() -> None:
    scheduler = Scheduler(Limits(kv_tokens=1000, context_length=100, step_tokens=64))
    model = ImaginaryModel(scheduler)
    prompt = list(range(3, 43))
    group = [make(prompt, 4, str(i)) for i in range(8)]
    for sequence in group:
        scheduler.add(sequence)
    model.drain()
    assert [s.cached for s in group] == [0] + [39] * 7
    # The prompt once, then per sibling its last token and three of its four new ones.
    assert model.fed == 40 + 7 * 1 + 8 * 3


def test_a_sibling_waits_only_for_the_shared_part() -> None:
    """Sharing ten tokens with a very long prompt must not mean waiting for all of it."""
    scheduler = Scheduler(Limits(kv_tokens=3000, context_length=2000, step_tokens=16))
    model = ImaginaryModel(scheduler)
    leader, follower = make([5] * 10 + [1] * 1500, 2, "long"), make([5] * 10 + [2] * 3, 2, "short")
    scheduler.add(leader)
    scheduler.add(follower)
    steps = 0
    while follower.state is not State.FINISHED:
        model.step()
        steps += 1
    assert steps <= 5
    assert follower.cached == 10
    assert leader.state is State.RUNNING


def test_late_arrivals_join_at_once_and_decoding_never_stops() -> None:
    scheduler = Scheduler(Limits(kv_tokens=5000, context_length=2000, max_running=8, step_tokens=16))
    model = ImaginaryModel(scheduler)
    first = make([1, 2, 3], 60, "first")
    scheduler.add(first)
    for _ in range(5):
        model.step()
    scheduler.add(make([7] * 500, 5, "long"))
    late = make([2, 1, 1], 5, "late")
    scheduler.add(late)
    steps = 0
    while late.state is not State.FINISHED:
        before = first.num_new
        model.step()
        assert first.num_new == before + 1
        steps += 1
    assert steps <= 7  # one to be admitted, five tokens, one to spare


def test_the_youngest_is_retracted_and_keeps_what_it_sampled() -> None:
    limits = Limits(kv_tokens=20, context_length=20, max_running=4, step_tokens=32, headroom=0)
    scheduler = Scheduler(limits, sharing=False)
    model = ImaginaryModel(scheduler)
    old, young = make([1] * 5, 12, "old"), make([2] * 5, 12, "young")
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.retracted:
        model.step()
    assert (old.retractions, young.retractions) == (0, 1)
    sampled = young.output_ids
    assert sampled
    model.drain()
    assert young.output_ids[: len(sampled)] == sampled
    assert young.num_new == 12


def test_nothing_computed_under_old_weights_is_shared() -> None:
    scheduler = Scheduler(Limits(kv_tokens=1000, context_length=100))
    model = ImaginaryModel(scheduler)
    prompt = list(range(20))
    running = make(prompt, 30, "in-place")
    scheduler.add(running)
    for _ in range(3):
        model.step()
    scheduler.paused = True
    model.new_weights(in_place=True)
    scheduler.paused = False
    new = make(prompt, 2, "new")
    scheduler.add(new)
    model.drain()
    assert new.cached == 0
    assert [v[0] for v in running.versions] == ["0", "1"]


@pytest.mark.parametrize("field", ["kv_tokens", "context_length", "max_running", "step_tokens"])
def test_limits_must_be_positive(field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        Limits(**{"kv_tokens": 1, "context_length": 1, field: 0})
