"""Requests of one moment are one call; every caller has its own answer, error and way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import DeadlineExceededError, EngineError, EngineUnavailableError, GenerateResult, SamplingParams
from miles_loop.bundles import BundlingEngine


def answer(name: str, seed: int | None) -> GenerateResult:
    """The seed, as a token."""
    return GenerateResult(
        output_ids=np.array([seed], np.int32),
        logprobs=np.zeros(1, np.float32),
        version_spans=(),
        finish_reason="stop",
        request_id=name,
    )


class Engine:
    """Notes its calls. A request finishes when its seed is let go; all are unless `holds`."""

    url = "http://engine"

    def __init__(self, *, able: bool = True, holds: bool = False, refuses: Sequence[int] = ()) -> None:
        self.able, self.holds, self.refuses = able, holds, refuses
        self.calls: list[list[int | None]] = []
        self.single: list[int | None] = []
        self.aborted: list[str | None] = []
        self.hung_up = 0
        self.error: Exception | None = None
        self.finished: asyncio.Queue[int] = asyncio.Queue()

    async def streams_batches(self) -> bool:
        return self.able

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **fields: Any) -> GenerateResult:
        self.single.append(params.seed)
        if params.seed in self.refuses:
            raise EngineError(self.url, "refused", 400)
        return answer(fields["request_id"], params.seed)

    async def generate_each(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, request_ids: Sequence[str]
    ) -> AsyncGenerator[tuple[int, GenerateResult], None]:
        seeds = [p.seed for p in params]
        self.calls.append(seeds)
        if any(seed in self.refuses for seed in seeds):
            raise EngineError(self.url, "refused", 400)
        left = set(seeds)
        try:
            while left:
                seed = await self.finished.get() if self.holds else next(s for s in seeds if s in left)
                if self.error is not None:
                    raise self.error
                left.discard(seed)
                yield seeds.index(seed), answer(request_ids[seeds.index(seed)], seed)
        except (asyncio.CancelledError, GeneratorExit):
            self.hung_up += 1
            raise

    async def abort(self, request_id: str | None = None) -> None:
        self.aborted.append(request_id)


def ask(engine: Engine, *seeds: int, proxy: BundlingEngine | None = None, **fields: Any) -> list[asyncio.Task[Any]]:
    """Ask for every seed in this moment."""
    proxy = proxy or BundlingEngine(engine)  # type: ignore[arg-type]

    async def one(seed: int) -> int:
        result = await proxy.generate([1, 2], SamplingParams(seed=seed), request_id=f"r{seed}", **fields)
        assert result.request_id == f"r{seed}"
        return int(result.output_ids[0])

    return [asyncio.create_task(one(seed)) for seed in seeds]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_of_one_moment_are_one_call() -> None:
    engine = Engine()
    proxy = BundlingEngine(engine)  # type: ignore[arg-type]
    assert await asyncio.gather(*ask(engine, 1, 2, 3, proxy=proxy)) == [1, 2, 3]
    assert await asyncio.gather(*ask(engine, 4, proxy=proxy)) == [4]
    assert (engine.calls, engine.single) == ([[1, 2, 3]], [4])


async def test_an_answer_does_not_wait_for_the_others() -> None:
    engine = Engine(holds=True)
    slow, quick = ask(engine, 1, 2)
    engine.finished.put_nowait(2)
    assert await quick == 2
    assert not slow.done()
    engine.finished.put_nowait(1)
    assert await slow == 1
    assert engine.aborted == []


@pytest.mark.parametrize("routing", [False, True])
async def test_what_cannot_be_streamed_is_asked_for_one_by_one(routing: bool) -> None:
    engine = Engine(able=routing)
    assert await asyncio.gather(*ask(engine, 1, 2, routing=routing)) == [1, 2]
    assert (engine.calls, engine.single) == ([], [1, 2])


async def test_a_refused_prompt_does_not_fail_the_others() -> None:
    engine = Engine(refuses=[2])
    first, second, third = await asyncio.gather(*ask(engine, 1, 2, 3), return_exceptions=True)
    assert (first, third) == (1, 3)
    assert isinstance(second, EngineError)
    assert (engine.calls, engine.single) == ([[1, 2, 3]], [1, 2, 3])


@pytest.mark.parametrize(
    "error",
    [EngineUnavailableError("http://engine", "gone"), DeadlineExceededError("x", 1.0, "y"), EngineError("e", "broken")],
    ids=lambda error: type(error).__name__,
)
async def test_who_has_an_answer_keeps_it_when_the_call_fails(error: Exception) -> None:
    engine = Engine(holds=True)
    quick, slow = ask(engine, 1, 2)
    engine.finished.put_nowait(1)
    assert await quick == 1
    engine.error = error
    engine.finished.put_nowait(2)
    with pytest.raises(type(error)):
        await slow
    assert engine.calls == [[1, 2]], "not sent again: somebody else decides that"


async def test_a_caller_that_gives_up_has_its_request_aborted() -> None:
    engine = Engine(holds=True)
    first, second = ask(engine, 1, 2)
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled()
    assert (engine.aborted, engine.hung_up) == (["r1"], 0)
    engine.finished.put_nowait(1)  # aborted: nobody waits for it
    engine.finished.put_nowait(2)
    assert await second == 2


async def test_when_all_give_up_the_call_is_ended() -> None:
    engine = Engine(holds=True)
    tasks = ask(engine, 1, 2, 3)
    await settle()
    for task in tasks:
        task.cancel()
    await settle()
    assert engine.hung_up == 1
    assert len(engine.aborted) <= 2


async def test_who_gives_up_before_the_call_is_not_part_of_it() -> None:
    engine = Engine()
    first, second, third = ask(engine, 1, 2, 3)
    await asyncio.sleep(0)
    first.cancel()
    assert (await second, await third) == (2, 3)
    assert engine.calls == [[2, 3]]


@given(st.lists(st.sampled_from(["answer", "cancel"]), min_size=2, max_size=8), st.randoms())
def test_every_caller_ends_in_any_order_of_events(ends: list[str], draw: Any) -> None:
    async def run() -> None:
        engine = Engine(holds=True)
        tasks = ask(engine, *range(len(ends)))
        await settle()
        order = list(range(len(ends)))
        draw.shuffle(order)
        for seed in order:
            if ends[seed] == "cancel":
                tasks[seed].cancel()
            else:
                engine.finished.put_nowait(seed)
            await settle()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [end == "cancel" for end in ends]
        assert [d for d in done if isinstance(d, int)] == [i for i, end in enumerate(ends) if end == "answer"]

    asyncio.run(run())


async def test_a_lone_caller_that_gives_up_hangs_up() -> None:
    ended = asyncio.Event()

    class Slow(Engine):
        async def generate(self, input_ids: Sequence[int], params: SamplingParams, **fields: Any) -> GenerateResult:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

    (task,) = ask(Slow(), 1)
    await settle()
    task.cancel()
    await settle()
    assert ended.is_set()
