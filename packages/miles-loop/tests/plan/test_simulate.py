"""The simulated pipeline: nothing is lost, bounds hold, and cases with a known answer give it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import workload

from miles_contracts import InvalidFieldError
from miles_loop.plan.engine import EngineRates
from miles_loop.plan.settings import Pipeline, TrainerRates
from miles_loop.plan.simulate import PlanError, Simulation, simulate
from miles_loop.plan.workload import Pareto
from miles_rollout.ledger import UnusedPolicy
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Granularity

ENGINE = EngineRates(base_s=0.002, per_sequence_s=0.0005)
CONSTANT = Pareto(0.5, tail=1.0)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    batch, size = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return Pipeline(
        batch_groups=batch,
        group_size=size,
        depth=draw(st.integers(0, 6)),
        max_in_flight=draw(st.none() | st.integers(size, 40)),
        buffer_groups=draw(st.none() | st.integers(batch, 3 * batch)),
        max_staleness=draw(st.none() | st.integers(1, 4)),
        granularity=draw(st.sampled_from(Granularity)),
        order=draw(st.sampled_from(TrainingOrder)),
        on_failure=draw(st.sampled_from(UnusedPolicy)),
        on_stale=draw(st.sampled_from(UnusedPolicy)),
        retract=draw(st.booleans()),
        engines=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 12)),
        warmup=0,
    )


@given(
    pipelines(),
    st.floats(0, 0.2),
    st.floats(0, 0.3),
    st.floats(0.0, 1.0),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_every_group_ends_somewhere_and_every_bound_holds(
    pipeline: Pipeline, failing: float, filtered: float, train_s: float, turns: int, seed: int
) -> None:
    work = workload(failure_rate=failing, filter_rate=filtered, turns=turns, spread=0.4, seed=seed)
    trainer = TrainerRates(fixed_s=train_s, prepare_s=0.01, pause_s=0.02)
    simulation = Simulation(pipeline, work, ENGINE, trainer)
    try:
        made = simulation.run()
    except PlanError:
        # A group that takes longer than the limit allows is never trained however often it is tried.
        if pipeline.max_staleness is None:
            raise
        assert simulation.largest_buffer <= pipeline.room
        return
    groups = dict(made.groups)
    assert groups.pop("started") == sum(groups.values())
    assert groups["trained"] == pipeline.batch_groups * pipeline.steps
    assert made.largest_buffer <= pipeline.room
    if pipeline.max_staleness is not None:
        assert made.max_staleness <= pipeline.max_staleness
    if pipeline.max_in_flight is not None:
        assert max(r.in_flight for r in made.records) <= pipeline.max_in_flight
    assert all(r.step_s >= trainer.step_s(0) - 1e-9 for r in made.records)
    assert 0.0 <= made.engine_idle <= 1.0
    assert 0.0 <= made.trainer_idle <= 1.0


@given(pipelines(), st.floats(0.01, 0.5))
@settings(deadline=None, max_examples=30)
def test_throughput_is_never_above_either_half_alone(pipeline: Pipeline, train_s: float) -> None:
    pipeline = dataclasses.replace(pipeline, max_staleness=None)
    rates, trainer = EngineRates(base_s=0.002), TrainerRates(fixed_s=train_s)
    made = simulate(pipeline, workload(delay=CONSTANT), rates, trainer)
    assert made.trajectories_per_s <= made.trajectories_per_batch / train_s * (1 + 1e-9)
    if pipeline.max_in_flight is not None:
        busy_s = 16 * 0.002 + 0.5  # seconds for which each trajectory holds its place
        assert made.trajectories_per_s <= pipeline.max_in_flight / busy_s * (1 + 1e-9)


@given(pipelines(), st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_equal_arguments_give_equal_outcomes(pipeline: Pipeline, seed: int) -> None:
    pipeline = dataclasses.replace(pipeline, max_staleness=None)
    trainer = TrainerRates(fixed_s=0.1)
    first, second = (simulate(pipeline, workload(seed=seed), ENGINE, trainer) for _ in range(2))
    assert first == second


def test_synchronous_is_the_sum_of_its_parts() -> None:
    pipeline = Pipeline(batch_groups=4, group_size=2, depth=0, steps=5, warmup=1)
    trainer = TrainerRates(fixed_s=0.3, per_token_s=0.001, prepare_s=0.05, pause_s=0.02, overhead_s=0.01)
    made = simulate(pipeline, workload(delay=CONSTANT), ENGINE, trainer)
    rollout_s = 16 * (0.002 + 8 * 0.0005) + 0.5
    assert made.step_s == pytest.approx(rollout_s + 0.3 + 8 * 26 * 0.001 + 0.05 + 0.02 + 0.01)
    assert made.trainer_idle == pytest.approx(rollout_s / made.step_s)
    assert made.max_staleness == 0
    assert made.engine_idle == pytest.approx(1 - 16 * (0.002 + 8 * 0.0005) / made.step_s)


def test_turns_wait_for_each_other_in_the_process_that_makes_trajectories() -> None:
    pipeline = Pipeline(batch_groups=1, group_size=4, depth=0, steps=3, warmup=1, handling_s=0.2)
    rates = EngineRates(base_s=1e-6, latency_s=0.1)
    made = simulate(pipeline, workload(delay=CONSTANT, sampled=1), rates, TrainerRates(fixed_s=0.3))
    # Sent at 0.1 to 0.4, answered 0.1 s later, and dealt with one after the other as soon as all are sent: 0.5 to 0.8.
    assert made.step_s == pytest.approx(0.8 + 0.5 + 0.3, abs=1e-4)
    assert made.engine_idle == pytest.approx(1.0, abs=1e-4)


def test_several_rollout_workers_share_the_turns() -> None:
    pipeline = Pipeline(batch_groups=1, group_size=4, depth=0, steps=3, warmup=1, handling_s=0.2, rollout_workers=2)
    rates = EngineRates(base_s=1e-6, latency_s=0.1)
    made = simulate(pipeline, workload(delay=CONSTANT, sampled=1), rates, TrainerRates(fixed_s=0.3))
    # Each has two: sent at 0.1 and 0.2, answered 0.1 s later, dealt with by 0.3 and 0.4.
    assert made.step_s == pytest.approx(0.4 + 0.5 + 0.3, abs=1e-4)
    with pytest.raises(InvalidFieldError, match="pipeline.rollout_workers"):
        Pipeline(batch_groups=1, group_size=1, depth=0, rollout_workers=0)


def test_an_engine_whose_weights_change_computes_nothing() -> None:
    # Four sequences of 1 s, two a batch: 0.5 s of computing between weight updates of 0.5 s each.
    pipeline = Pipeline(batch_groups=2, group_size=1, depth=20, max_in_flight=4, steps=30, warmup=10)
    work = workload(delay=Pareto(0.0, tail=1.0), sampled=100)
    made = simulate(pipeline, work, EngineRates(base_s=0.01), TrainerRates(fixed_s=0.0, pause_s=0.5))
    assert made.engine_idle == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("train_s", [0.05, 0.2, 0.8])
def test_asynchronous_is_the_slower_of_its_parts(train_s: float) -> None:
    # 16 in flight, each for 0.532 s: a batch of 8 every 0.266 s, whatever the trainer does meanwhile.
    pipeline = Pipeline(batch_groups=8, group_size=1, depth=50, max_in_flight=16, steps=80, warmup=40)
    made = simulate(pipeline, workload(delay=CONSTANT), EngineRates(base_s=0.002), TrainerRates(fixed_s=train_s))
    assert made.step_s == pytest.approx(max(8 * 0.532 / 16, train_s), rel=0.01)


def closed_network(customers: int, service_s: float, think_s: float) -> float:
    """Throughput of a closed network of one processor-sharing server and a delay station, by mean value analysis.

    It depends on both distributions through their means only.
    """
    waiting = throughput = 0.0
    for n in range(1, customers + 1):
        response = service_s * (1.0 + waiting)
        throughput = n / (response + think_s)
        waiting = throughput * response
    return throughput


@pytest.mark.parametrize("in_flight", [2, 6, 12, 30])
def test_shared_engine_with_heavy_tails_has_the_throughput_of_mean_value_analysis(in_flight: int) -> None:
    delay = Pareto(0.25, 1.5, 20.0)
    pipeline = Pipeline(
        batch_groups=50, group_size=1, depth=10**6, max_in_flight=in_flight, buffer_groups=10**6, steps=220, warmup=20
    )
    # All arithmetic, no reading: a step of n sequences takes n times as long, which is processor sharing.
    made = simulate(pipeline, workload(delay=delay, spread=1.0), EngineRates(base_s=0, per_sequence_s=0.005), None)
    expected = closed_network(in_flight, 16 * 0.005, delay.mean)
    assert made.trajectories_per_s == pytest.approx(expected, rel=0.04)


def test_weight_updates_cost_what_they_say() -> None:
    pipeline = Pipeline(batch_groups=4, group_size=1, depth=10, max_in_flight=4, steps=40, warmup=20)
    rates = EngineRates(base_s=0.01, prefill_s_per_token=0.001)
    work = workload(delay=Pareto(0.0, tail=1.0), sampled=400, prompt=0)
    free, frozen, again = (
        simulate(
            dataclasses.replace(pipeline, retract=retract),
            work,
            rates,
            TrainerRates(fixed_s=0.1, pause_s=pause_s),
        )
        for retract, pause_s in ((False, 0.0), (False, 0.5), (True, 0.5))
    )
    assert free.step_s == pytest.approx(4.0, rel=0.02)
    assert frozen.step_s == pytest.approx(free.step_s + 0.5, rel=0.02)
    assert again.step_s > frozen.step_s + 0.005


def test_turns_find_their_prefix_until_weights_change() -> None:
    pipeline = Pipeline(batch_groups=4, group_size=1, depth=0, steps=6, warmup=0)
    work = workload(turns=4, prompt=100, sampled=10, delay=CONSTANT)
    made = simulate(pipeline, work, EngineRates(base_s=0.001), TrainerRates(fixed_s=0.1))
    # 24 trajectories, and the first turns of 4 more that have just been started
    contexts, computed = 24 * (100 + 210 + 320 + 430) + 4 * 100, (24 * 4 + 4) * 100
    assert made.prefix_hit_rate == pytest.approx(1 - computed / contexts)
    cold = simulate(dataclasses.replace(pipeline, prefix_cache=False), work, ENGINE, TrainerRates(fixed_s=0.1))
    assert cold.prefix_hit_rate == 0.0


def test_what_can_never_be_kept_is_reported() -> None:
    pipeline = Pipeline(batch_groups=4, group_size=8, depth=1, steps=5, warmup=0)
    with pytest.raises(PlanError, match="groups were started for 0 trained"):
        simulate(pipeline, workload(failure_rate=0.99), ENGINE, TrainerRates(fixed_s=0.1))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("pipeline.warmup", {"warmup": 5, "steps": 5}),
        ("pipeline.buffer_groups", {"buffer_groups": 3}),
        ("pipeline.engines", {"engines": 0}),
    ],
)
def test_shapes_that_cannot_be_are_refused(field: str, values: dict[str, int]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Pipeline(**({"batch_groups": 4, "group_size": 1, "depth": 1} | values))
    assert caught.value.field == field


def test_more_in_flight_than_a_group_needs_is_checked_by_the_scheduler() -> None:
    pipeline = Pipeline(batch_groups=4, group_size=8, depth=1, max_in_flight=4)
    with pytest.raises(InvalidFieldError, match="max_trajectories"):
        simulate(pipeline, workload(), ENGINE, TrainerRates(fixed_s=0.1))


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"trainer\.fixed_s"):
        TrainerRates(fixed_s=-1.0)
