"""A turn survives the death of its engine; an engine returns only with the current weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from rollout_factories import MemoryEngine

from miles_contracts import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    InvalidFieldError,
    SamplingParams,
)
from miles_rollout.engine_stream import PartialResult
from miles_rollout.router import Router, RouterConfig

PARAMS = SamplingParams(max_new_tokens=8, seed=3)
FAST = {"health_interval_s": 0.01, "health_deadline_s": 0.05}


def engines(count: int = 2, **kw) -> list[MemoryEngine]:
    return [MemoryEngine(f"http://engine-{i}", **kw) for i in range(count)]


async def test_turns_of_a_session_stay_on_one_engine() -> None:
    fleet = engines()
    router = Router(fleet)
    for _ in range(3):
        await router.generate("a", [1, 2], PARAMS)
        await router.generate("b", [1, 2, 3], PARAMS)
    assert {len(e.served) for e in fleet} == {3}
    assert {p for p, _ in fleet[0].served} == {(1, 2)}
    router.forget("a")


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_a_dead_engine_loses_only_its_turns_and_they_give_the_same_tokens(moment: str) -> None:
    fleet = engines(delay=0.05)
    router = Router(fleet, version=0)
    expected = (await Router(engines()).generate("x", [1, 2], PARAMS)).output_ids.tolist()
    if moment == "before":
        fleet[0].dead = True
        result = await router.generate("x", [1, 2], PARAMS)
    else:
        turn = asyncio.create_task(router.generate("x", [1, 2], PARAMS))
        await asyncio.sleep(0.01)
        fleet[0].dead = True
        result = await turn
    assert result.output_ids.tolist() == expected
    assert router.reissued_turns == 1
    assert router.quarantined == {"http://engine-0": "connection refused"}
    assert [e.url for e in router.serving] == ["http://engine-1"]
    metrics = router.metrics()
    assert metrics["router/reissued_turns"] == metrics["router/quarantines"] == metrics["router/engines_serving"] == 1
    assert metrics["router/outstanding_tokens"] == 0


async def test_a_hanging_engine_is_found_by_its_health_check_and_its_turns_move_at_once() -> None:
    fleet = engines()
    router = Router(fleet, version=0, config=RouterConfig(health_misses=2, **FAST))
    await router.start()
    fleet[0].hung.clear()
    result = await asyncio.wait_for(router.generate("x", [1, 2], PARAMS), timeout=10)
    assert len(result.output_ids)
    assert "no answer to a health check within 0.05 s" in router.quarantined["http://engine-0"]
    await router.close()
    assert fleet[0].aborted, "the engine is told that nobody waits any more"


async def test_health_checks_run_side_by_side() -> None:
    together = asyncio.Barrier(20)

    class Meeting(MemoryEngine):
        async def healthy(self) -> bool:
            await together.wait()  # answers only once all twenty are being asked
            return True

    router = Router([Meeting(f"http://engine-{i}") for i in range(20)], config=RouterConfig(health_misses=1))
    await router.check_health()
    assert router.quarantined == {}


async def test_one_missed_check_is_forgiven() -> None:
    fleet = engines()
    router = Router(fleet, version=0, config=RouterConfig(health_misses=2, health_deadline_s=0.02))
    fleet[0].hung.clear()
    await router.check_health()
    fleet[0].hung.set()
    await router.check_health()
    fleet[0].hung.clear()
    await router.check_health()
    assert router.quarantined == {}


async def test_an_engine_returns_only_with_the_current_weights() -> None:
    fleet = engines()
    router = Router(fleet, version=4)
    fleet[1].version = 4
    fleet[0].version = None  # started anew with the weights of the checkpoint it was given
    await router.check_health()
    assert router.quarantined == {"http://engine-0": "it serves version None, the current one is 4"}
    fleet[0].version = 3
    await router.check_health()
    assert "serves version 3" in router.quarantined["http://engine-0"]
    fleet[0].version = 4
    await router.check_health()
    assert router.quarantined == {}


async def test_the_next_version_is_not_held_against_an_engine() -> None:
    fleet = engines()
    router = Router(fleet, version=0)
    fleet[0].version = 1  # committed here, not yet everywhere
    await router.check_health()
    assert router.quarantined == {}


async def test_an_engine_may_be_between_versions_while_an_update_is_under_way() -> None:
    fleet = engines()
    router = Router(fleet, version=0)
    fleet[0].version = None
    with router.updating():
        await router.check_health()
        fleet[0].hung.clear()
        checking = asyncio.create_task(router.check_health())
        for _ in range(5):  # until it waits for the engine
            await asyncio.sleep(0)
    fleet[0].hung.set()
    await checking  # it began during the update, whatever it saw is of that time
    assert router.quarantined == {}
    await router.check_health()
    assert router.quarantined == {"http://engine-0": "it serves version None, the current one is 0"}


async def test_a_restarted_engine_is_quarantined_until_it_is_checked() -> None:
    fleet = engines()
    router = Router(fleet, version=0)
    again = MemoryEngine("http://engine-0")
    router.add_engine(again)
    third = MemoryEngine("http://engine-2")
    router.add_engine(third)
    assert router.quarantined == {"http://engine-0": "restarted", "http://engine-2": "new"}
    await router.check_health()
    assert len(router.serving) == 3
    await router.generate("x", [1, 2], PARAMS)
    assert len(again.served) == 1


async def test_turns_wait_for_an_engine_and_give_up_with_the_reasons() -> None:
    fleet = engines(1)
    router = Router(fleet, version=0, config=RouterConfig(no_engine_s=0.05))
    router.quarantine("http://engine-0", "out for repair")
    with pytest.raises(DeadlineExceededError, match="engine-0: out for repair"):
        await router.generate("x", [1], PARAMS)
    waiting = asyncio.create_task(router.generate("x", [1], PARAMS))
    await asyncio.sleep(0)
    await router.check_health()
    assert len((await waiting).output_ids)


async def test_strikes_quarantine_an_engine_that_keeps_failing() -> None:
    fleet = engines()
    fleet[0].failures = [EngineError(fleet[0].url, "garbage") for _ in range(3)]
    router = Router(fleet, version=0, config=RouterConfig(strikes=3))
    for index in range(3):
        router.forget("x")
        router._table.slots["http://engine-1"].outstanding += 1000  # keep placing on engine 0
        await router.generate("x", [index + 1], PARAMS)
    assert router.reissued_turns == 3
    assert router.quarantined == {"http://engine-0": "3 failures in a row, the last: garbage"}


async def test_a_success_clears_the_strikes() -> None:
    fleet = engines(1)
    router = Router(fleet, config=RouterConfig(strikes=2))
    for _ in range(3):
        fleet[0].failures = [EngineError(fleet[0].url, "overloaded", 503)]
        await router.generate("x", [1], PARAMS)
    assert router.quarantined == {}


async def test_a_refused_request_is_not_issued_again() -> None:
    fleet = engines()
    fleet[0].failures = [EngineError(fleet[0].url, "input too long", 400)]
    router = Router(fleet)
    with pytest.raises(EngineError, match="too long"):
        await router.generate("x", [1], PARAMS)
    assert router.reissued_turns == 0
    assert router.quarantined == {}


async def test_an_engine_that_hangs_only_in_sampling_is_struck_out_for_longer_each_time() -> None:
    class Stuck(MemoryEngine):
        async def generate(self, *args, **kwargs):
            await self.hung.wait()
            return await super().generate(*args, **kwargs)

        async def _alive(self) -> None:
            """Health checks are answered all the time."""

    stuck = Stuck("http://engine-0")
    stuck.hung.clear()
    router = Router([stuck], version=0, config=RouterConfig(turn_deadline_s=0.01, strikes=2))
    for rounds in (1, 2, 4):
        for _ in range(2):
            with pytest.raises(DeadlineExceededError):
                await router.generate("x", [1], PARAMS)
        for _ in range(rounds):
            await router.check_health()
            assert "2 failures in a row" in router.quarantined[stuck.url], "it answers, but it does not sample"
        await router.check_health()
        assert router.quarantined == {}
    stuck.hung.set()
    await router.generate("x", [1], PARAMS)
    assert router._sentence[stuck.url] == 0, "it has proved itself"
    await router.close()


async def test_reissues_are_bounded() -> None:
    fleet = engines(1)
    fleet[0].failures = [EngineError(fleet[0].url, f"failure {i}", 500) for i in range(9)]
    router = Router(fleet, config=RouterConfig(max_reissues=2, strikes=100))
    with pytest.raises(EngineError, match="failure 2"):
        await router.generate("x", [1], PARAMS)
    assert len(fleet[0].failures) == 6


async def test_a_slow_turn_ends_and_is_aborted() -> None:
    fleet = engines(1, delay=30)
    router = Router(fleet, config=RouterConfig(turn_deadline_s=0.02))
    with pytest.raises(DeadlineExceededError, match="a turn on http://engine-0"):
        await router.generate("x", [1], PARAMS)
    await router.close()
    assert len(fleet[0].aborted) == 1
    assert router.metrics()["router/outstanding_tokens"] == 0


async def test_a_cancelled_turn_is_aborted() -> None:
    fleet = engines(1, delay=30)
    router = Router(fleet)
    turn = asyncio.create_task(router.generate("x", [1], PARAMS))
    await asyncio.sleep(0.01)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await router.close()
    assert len(fleet[0].aborted) == 1
    assert fleet[0].running == 0
    assert router.metrics()["router/outstanding_tokens"] == 0


async def test_misuse_is_refused() -> None:
    router = Router(engines(), version=3)
    await router.start()
    with pytest.raises(InvalidFieldError, match="start it once"):
        await router.start()
    with pytest.raises(InvalidFieldError, match="never go back"):
        router.set_version(2)
    await router.close()
    await router.close()


async def test_hit_rates_per_engine_and_in_total() -> None:
    fleet = engines()
    router = Router(fleet)
    await router.generate("a", [1] * 10, PARAMS)
    await router.generate("b", [1] * 30, PARAMS)
    slots = router._table.slots
    slots["http://engine-0"].cached_tokens, slots["http://engine-1"].cached_tokens = 5, 27
    metrics = router.metrics()
    assert metrics["router/engine_0/prefix_cache_hit_rate"] == 0.5
    assert metrics["router/engine_1/prefix_cache_hit_rate"] == 0.9
    assert metrics["rollout/prefix_cache_hit_rate"] == 32 / 40


class GrowingEngine(MemoryEngine):
    """Shows the answer once before its end, and then dies if it is told to."""

    def __init__(self, url: str, *, dies: bool) -> None:
        super().__init__(url)
        self.dies = dies

    async def generate_stream(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> AsyncIterator[PartialResult | GenerateResult]:
        result = await self.generate(
            input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
        )
        yield PartialResult(result.output_ids[:1])
        if self.dies:
            raise EngineUnavailableError(self.url, "died")
        yield result


@pytest.mark.parametrize("passed_on", [False, True])
async def test_a_turn_that_was_shown_is_not_issued_again(passed_on: bool) -> None:
    fleet = [GrowingEngine("http://engine-0", dies=True), GrowingEngine("http://engine-1", dies=False)]
    router = Router(fleet)
    seen: list[list[int]] = []

    def show(ids: NDArray[np.int32]) -> bool:
        seen.append(ids.tolist())
        return passed_on

    if passed_on:
        with pytest.raises(EngineUnavailableError, match="died"):
            await router.generate("x", [1, 2], PARAMS, on_partial=show)
        assert (len(seen), router.reissued_turns) == (1, 0)
    else:
        result = await router.generate("x", [1, 2], PARAMS, on_partial=show)
        assert seen == [result.output_ids[:1].tolist()] * 2
        assert router.reissued_turns == 1
    assert router.quarantined == {"http://engine-0": "died"}
    assert router.metrics()["router/outstanding_tokens"] == 0


async def test_engines_that_cannot_stream_show_nothing_and_answer() -> None:
    router = Router(engines())
    result = await router.generate("x", [1, 2], PARAMS, on_partial=lambda _: pytest.fail("shown"))
    assert len(result.output_ids)
