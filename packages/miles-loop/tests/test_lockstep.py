"""Rounds depend on what is asked and never on when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from miles_contracts import EngineError, EngineUnavailableError, GenerateResult, SamplingParams, VersionSpan
from miles_loop.lockstep import Lockstep, LockstepEngine


class Engine:
    """Notes the rounds it was sent."""

    url = "http://engine"

    def __init__(self, refuse: int | None = None, dead: bool = False) -> None:
        self.rounds: list[list[int | None]] = []
        self._refuse, self._dead = refuse, dead

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
        **_: Any,
    ) -> list[GenerateResult]:
        self.rounds.append([p.seed for p in params])
        await asyncio.sleep(0.001)
        if self._dead:
            raise EngineUnavailableError(self.url, "gone")
        if any(p.seed == self._refuse for p in params):
            raise EngineError(self.url, "refused", 400)
        return [
            GenerateResult(
                output_ids=np.array([p.seed], np.int32),
                logprobs=np.zeros(1, np.float32),
                version_spans=(VersionSpan(start=0, end=1, version=0),),
                finish_reason="stop",
                request_id=name,
            )
            for p, name in zip(params, request_ids, strict=True)
        ]


async def ask(engine: Any, lockstep: Lockstep, seeds: Sequence[int], delays: Sequence[float] = ()) -> list[Any]:
    """Ask for every seed, each after its delay."""
    proxy = LockstepEngine(engine, lockstep)

    async def one(seed: int, delay: float) -> int:
        await asyncio.sleep(delay)
        result = await proxy.generate([1, 2], SamplingParams(seed=seed), request_id=f"r{seed}")
        return int(result.output_ids[0])

    pauses = delays or [0.0] * len(seeds)
    tasks = [one(seed, delay) for seed, delay in zip(seeds, pauses, strict=True)]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_round_waits_for_all_in_flight_and_is_sorted() -> None:
    draw = random.Random(3)
    for _ in range(5):
        engine = Engine()
        seeds = [4, 1, 3, 2]
        draw.shuffle(seeds)
        answers = await ask(engine, Lockstep(lambda: 4), seeds, [draw.random() * 0.01 for _ in seeds])
        assert answers == seeds
        assert engine.rounds == [[1, 2, 3, 4]]


async def test_without_a_count_a_round_is_what_comes_at_once() -> None:
    engine = Engine()
    assert await ask(engine, Lockstep(), [2, 1]) == [2, 1]
    assert engine.rounds == [[1, 2]]


async def test_what_comes_during_a_round_makes_the_next() -> None:
    engine, lockstep, in_flight = Engine(), Lockstep(), [2]
    lockstep.in_flight = lambda: in_flight[0]
    first = asyncio.create_task(ask(engine, lockstep, [1, 2]))
    while not engine.rounds:  # noqa: ASYNC110
        await asyncio.sleep(0.0001)
    in_flight[0] = 1
    assert await ask(engine, lockstep, [3]) == [3]
    assert await first == [1, 2]
    assert engine.rounds == [[1, 2], [3]]


async def test_a_refused_request_does_not_fail_the_others() -> None:
    answers = await ask(Engine(refuse=2), Lockstep(lambda: 3), [1, 2, 3])
    assert answers[0] == 1
    assert answers[2] == 3
    assert isinstance(answers[1], EngineError)


async def test_a_dead_engine_fails_all_at_once() -> None:
    engine = Engine(dead=True)
    answers = await ask(engine, Lockstep(lambda: 3), [1, 2, 3])
    assert all(isinstance(a, EngineUnavailableError) for a in answers)
    assert len(engine.rounds) == 1


async def test_a_cancelled_request_leaves_its_round() -> None:
    engine, lockstep, in_flight = Engine(), Lockstep(), [2]
    lockstep.in_flight = lambda: in_flight[0]
    proxy: Any = LockstepEngine(engine, lockstep)  # type: ignore[arg-type]
    waiting = asyncio.create_task(proxy.generate([1], SamplingParams(seed=9)))
    await asyncio.sleep(0.002)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    in_flight[0] = 1
    assert await ask(engine, lockstep, [1]) == [1]
    assert engine.rounds == [[1]]


async def test_an_engine_that_hangs_holds_up_nobody_once_it_is_given_up() -> None:
    class Hanging(Engine):
        """Never answers."""

        async def generate_batch(self, *arguments: Any, **named: Any) -> list[GenerateResult]:
            self.rounds.append([])
            await asyncio.Event().wait()
            raise AssertionError

    lockstep, hanging, good = Lockstep(lambda: 2), Hanging(), Engine()
    given_up = asyncio.create_task(ask(hanging, lockstep, [1, 2]))
    while not hanging.rounds:  # noqa: ASYNC110
        await asyncio.sleep(0.0001)
    waiting = asyncio.create_task(ask(good, lockstep, [3, 4]))
    await asyncio.sleep(0.005)
    assert good.rounds == []
    given_up.cancel()
    assert await waiting == [3, 4]
