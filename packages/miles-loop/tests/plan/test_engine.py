"""The simulated engine: arithmetic of steps, sharing, prompts, bounds and pauses."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import RoundsEngine, run_in_simulated_time

from miles_contracts import InvalidFieldError
from miles_loop.plan.engine import EngineRates, Request, SimEngine
from miles_loop.plan.workload import Lengths, Pareto


def drain(engine: SimEngine) -> dict[object, float]:
    """When each request leaves."""
    left: dict[object, float] = {}
    while (time := engine.next_event()) < math.inf:
        engine.advance(time)
        for request in engine.finished():
            left[request.owner] = time
    return left


def request(name: str, *, prefill: int = 0, context: int = 0, sampled: int = 100) -> Request:
    return Request(name, prefill, context, sampled)


def test_steps_of_both_kinds() -> None:
    plain = EngineRates(base_s=1.0, per_sequence_s=0.5, per_context_token_s=0.01, overhead_s=0.25)
    assert plain.step_s(4, 100.0) == pytest.approx(1.0 + 2.0 + 1.0 + 0.25)
    overlapped = EngineRates(base_s=1.0, per_sequence_s=0.5, per_context_token_s=0.01, overhead_s=0.25, roofline=True)
    assert overlapped.step_s(2, 0.0) == pytest.approx(1.25)
    assert overlapped.step_s(40, 0.0) == pytest.approx(20.25)
    experts = EngineRates(base_s=1.0, expert_s=8.0, expert_share=0.25)
    assert experts.step_s(1, 0.0) == pytest.approx(3.0)
    assert experts.step_s(2, 0.0) == pytest.approx(1.0 + 8.0 * (1 - 0.75**2))
    assert EngineRates(base_s=0.1, tokens_per_step=2.0).tokens_per_s(3) == pytest.approx(60.0)


def test_a_measured_curve_is_straight_between_its_points() -> None:
    rates = EngineRates(curve=((2, 0.01), (4, 0.03), (8, 0.04)))
    steps = {1: 0.01, 2: 0.01, 3: 0.02, 4: 0.03, 6: 0.035, 8: 0.04, 16: 0.06}
    assert {n: rates.step_s(n, 0.0) for n in steps} == pytest.approx(steps)
    assert EngineRates(curve=((4, 0.02),)).step_s(9, 0.0) == 0.02
    falling = EngineRates(curve=((1, 0.03), (2, 0.02)))
    assert falling.step_s(100, 0.0) == 0.02


def test_sequences_share_the_engine() -> None:
    engine = SimEngine(EngineRates(base_s=0.0, per_sequence_s=0.01))
    engine.add(request("long", sampled=300))
    engine.advance(1.0)  # alone: 100 tokens
    engine.add(request("short", sampled=100))
    left = drain(engine)
    assert left == {"short": pytest.approx(1.0 + 100 * 0.02), "long": pytest.approx(3.0 + 100 * 0.01)}
    assert engine.busy_s == pytest.approx(4.0)
    assert engine.tokens == 400


def test_a_prompt_holds_everybody_up() -> None:
    engine = SimEngine(EngineRates(base_s=0.01, prefill_s_per_token=0.001))
    engine.add(request("first", sampled=100))
    engine.advance(0.5)
    engine.add(request("second", prefill=2000, context=2000, sampled=100))
    left = drain(engine)
    assert left == {"first": pytest.approx(3.0), "second": pytest.approx(3.5)}


def test_who_arrives_in_the_middle_of_a_round_starts_with_the_next() -> None:
    for rounds, expected in ((True, 3.0), (False, 2.5)):
        engine = SimEngine(EngineRates(base_s=1.0, rounds=rounds))
        engine.add(request("first", sampled=3))
        engine.advance(0.5)
        engine.add(request("second", sampled=2))
        assert drain(engine) == {"first": pytest.approx(3.0), "second": pytest.approx(expected)}
    engine = SimEngine(EngineRates(base_s=1.0, tokens_per_step=2.0))
    engine.add(request("three tokens in two rounds", sampled=3))
    engine.advance(0.25)
    engine.add(request("one more", sampled=4))
    assert drain(engine) == {"three tokens in two rounds": pytest.approx(2.0), "one more": pytest.approx(3.0)}
    assert engine.context_tokens == pytest.approx(0.0)


def real_rounds(arrivals: list[tuple[float, int]], rates: EngineRates) -> list[float]:
    """When each (arrival, tokens) is answered by the scheduler of a real engine."""

    async def main() -> list[float]:
        engine, loop = RoundsEngine(rates), asyncio.get_running_loop()

        async def one(arrives: float, tokens: int) -> float:
            await asyncio.sleep(arrives)
            await engine.answer(tokens)
            return loop.time()

        return await asyncio.gather(*(one(*arrival) for arrival in arrivals))

    return run_in_simulated_time(main())


@given(
    # Never exactly at the end of a round, where a rounding error decides which one is next, and never together.
    st.lists(
        st.tuples(st.integers(0, 700).map(lambda n: n * math.pi / 4300), st.integers(1, 40)),
        min_size=1,
        max_size=25,
        unique_by=lambda arrival: arrival[0],
    ),
    st.integers(1, 8),
)
@settings(deadline=None)
def test_rounds_are_those_of_the_embedded_engine(arrivals: list[tuple[float, int]], most: int) -> None:
    rates = EngineRates(base_s=0.003, per_sequence_s=0.0011, max_running=most)
    engine, made = SimEngine(rates), {}
    for number, (arrives, tokens) in sorted(enumerate(arrivals), key=lambda a: a[1][0]):
        while (time := engine.next_event()) <= arrives:
            engine.advance(time)
            made.update({r.owner: time for r in engine.finished()})
        engine.advance(arrives)
        engine.add(Request(number, 0, 0, tokens))
    made.update(drain(engine))
    assert [made[number] for number in range(len(arrivals))] == pytest.approx(real_rounds(arrivals, rates), abs=1e-6)


def test_growing_contexts_slow_the_engine_down() -> None:
    # One sequence from context 0: step i takes base + i * c, so n tokens take n * base + c * n^2 / 2.
    engine = SimEngine(EngineRates(base_s=0.01, per_context_token_s=1e-5))
    engine.add(request("only", sampled=2000))
    assert drain(engine)["only"] == pytest.approx(20.0 + 1e-5 * 2000**2 / 2, rel=1e-3)


def test_bounds_make_requests_wait() -> None:
    engine = SimEngine(EngineRates(base_s=0.01, max_running=1))
    engine.add(request("a"))
    engine.add(request("b"))
    assert drain(engine) == {"a": pytest.approx(1.0), "b": pytest.approx(2.0)}
    engine = SimEngine(EngineRates(base_s=0.01, kv_tokens=250))
    for name in "abc":
        engine.add(request(name, sampled=100))
    assert drain(engine) == {"a": pytest.approx(1.0), "b": pytest.approx(1.0), "c": pytest.approx(2.0)}
    engine = SimEngine(EngineRates(base_s=0.01, kv_tokens=50))
    engine.add(request("larger than all there is"))
    assert drain(engine) == {"larger than all there is": pytest.approx(1.0)}


def test_new_weights_in_the_middle() -> None:
    engine = SimEngine(EngineRates(base_s=0.01, prefill_s_per_token=0.001))
    running, later = request("running", context=100), request("later")
    engine.add(running)
    engine.advance(0.5)
    engine.pause()
    assert engine.next_event() == math.inf
    engine.advance(0.75)
    engine.add(later)
    engine.advance(1.0)
    engine.resume(7, recompute=True)
    left = drain(engine)
    assert left["running"] == pytest.approx(1.0 + 0.150 + 0.5)  # 150 tokens of context are computed again
    assert (running.first_version, running.last_version) == (0, 7)
    assert (later.first_version, later.last_version) == (7, 7)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 200), st.integers(0, 100)), min_size=1, max_size=20))
@settings(deadline=None)
def test_no_token_is_lost_and_nobody_overtakes_an_equal(requests: list[tuple[float, int, int]]) -> None:
    engine = SimEngine(
        EngineRates(
            base_s=0.01, per_sequence_s=0.001, per_context_token_s=1e-6, prefill_s_per_token=1e-3, max_running=4
        )
    )
    left: dict[object, float] = {}

    def until(limit: float) -> None:
        while (time := engine.next_event()) <= limit and time < math.inf:
            engine.advance(time)
            left.update({r.owner: time for r in engine.finished()})
        engine.advance(limit)

    for name, (arrives, sampled, prompt) in enumerate(sorted(requests)):
        until(arrives)
        engine.add(Request(name, prompt, prompt, sampled))
    left.update(drain(engine))
    assert sorted(left) == list(range(len(requests)))  # type: ignore[type-var]
    assert engine.tokens == sum(sampled for _, sampled, _ in requests)
    assert engine.outstanding == 0
    assert engine.context_tokens == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("base_s", {"base_s": -1.0}),
        ("base_s", {"base_s": 0.0}),
        ("base_s", {"base_s": math.nan}),
        ("tokens_per_step", {"base_s": 1.0, "tokens_per_step": 0.0}),
        ("max_running", {"base_s": 1.0, "max_running": 0}),
        ("kv_tokens", {"base_s": 1.0, "kv_tokens": 0}),
        ("curve", {"curve": ((2, 0.1), (1, 0.1))}),
        ("curve", {"curve": ((0, 0.1),)}),
        ("curve", {"curve": ((1, 0.0),)}),
        ("expert_share", {"base_s": 1.0, "expert_share": 0.0}),
    ],
)
def test_rates_that_cannot_be_are_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        EngineRates(**values)
    assert caught.value.field == field


@pytest.mark.parametrize(("alpha", "tail"), [(1.5, 20.0), (1.0, 20.0), (0.7, 100.0), (3.0, 1.0)])
def test_the_mean_of_a_cut_pareto(alpha: float, tail: float) -> None:
    delay = Pareto(2.0, alpha, tail)
    count = 200_000
    numeric = sum(delay.at((i + 0.5) / count) for i in range(count)) / count
    assert delay.mean == pytest.approx(numeric, rel=1e-3)
    assert Pareto.of_mean(7.0, alpha=alpha, tail=tail).mean == pytest.approx(7.0)
    assert delay.at(0.0) == 2.0
    assert delay.at(1 - 1e-16) == pytest.approx(2.0 * tail)


@pytest.mark.parametrize(("field", "values"), [("tail", (1.0, 1.5, 0.5)), ("alpha", (1.0, 0.0)), ("scale", (-1.0,))])
def test_delays_that_cannot_be_are_refused(field: str, values: tuple[float, ...]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Pareto(*values)
    assert caught.value.field == field


def test_lengths_have_their_mean_and_spread() -> None:
    import random
    import statistics

    rng = random.Random(1)
    drawn = [Lengths(1000, 0.8).draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(1000, rel=0.03)
    assert statistics.pstdev(drawn) / statistics.fmean(drawn) == pytest.approx(0.8, rel=0.08)
    assert Lengths(5).draw(rng) == 5
    assert Lengths(0).draw(rng) == 0
    assert max(Lengths(1000, 0.8, most=1200).draw(rng) for _ in range(100)) == 1200
