"""EngineClient.generate_stream: a growing answer, every way in which it can break off, and hanging up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from engine_serving import bind
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    SamplingParams,
)
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.engine_stream import EventBuffer, PartialResult, generate_on

PARAMS = SamplingParams(max_new_tokens=2)
FINAL = {
    "output_ids": [7, 8],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
        "weight_version": "4",
    },
}
PARTIAL = {"output_ids": [7], "meta_info": {"id": "x", "finish_reason": None}}


class Streamer:
    """Sends what it is given on /generate, and remembers the request and the aborts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.asked: Any = None
        self.aborted: list[Any] = []
        self.hung_up = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for part in self.parts:
                if isinstance(part, asyncio.Event):
                    await part.wait()
                    continue
                data = part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n"
                await response.write(data)
            await response.write_eof()
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append(await request.json())
        return web.json_response({"success": True})


@asynccontextmanager
async def client_of(
    streamer: Streamer, info: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[EngineClient]:
    app = web.Application()

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response(info)

    if info is not None:
        app.router.add_get("/server_info", server_info)
    app.router.add_post("/generate", streamer.generate)
    app.router.add_post("/abort_request", streamer.abort)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener).start()
    try:
        async with EngineClient("http://{}:{}".format(*listener.getsockname()[:2]), **options) as client:
            yield client
    finally:
        await runner.cleanup()


async def results(client: EngineClient, **fields: Any) -> list[PartialResult | GenerateResult]:
    return [r async for r in client.generate_stream([1, 2], PARAMS, **fields)]


async def test_partial_results_then_the_result() -> None:
    more = asyncio.Event()
    streamer = Streamer(PARTIAL, more, FINAL, b"data: [DONE]\n\n")
    async with client_of(streamer) as client:
        stream = client.generate_stream([1, 2], PARAMS, request_id="x")
        first = await anext(stream)
        assert isinstance(first, PartialResult)
        assert first.output_ids.tolist() == [7]
        more.set()
        last = await anext(stream)
        assert isinstance(last, GenerateResult)
        assert (last.output_ids.tolist(), last.finish_reason, last.request_id) == ([7, 8], "length", "x")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert streamer.asked["stream"] is True
    assert (streamer.asked["rid"], streamer.asked["input_ids"]) == ("x", [1, 2])


def increment(*ids: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """An event with these tokens alone."""
    triples = [[-i / 8, i, None] for i in ids]
    meta = {"id": "x", "finish_reason": finish, "output_token_logprobs": triples, "weight_version": "4"}
    return {"output_ids": list(ids), "meta_info": meta}


@pytest.mark.parametrize("together", [True, False])
async def test_increments_are_put_together(together: bool) -> None:
    parts = [increment(7), increment(8, 9), increment(finish={"type": "length", "length": 3})]
    if together:  # in one piece, where only the newest of whole answers would be read
        parts = [b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts)]
    info = {"version": "0.5.23", "incremental_streaming_output": True}
    async with client_of(Streamer(*parts), info) as client:
        *partials, last = await results(client)
    assert [p.output_ids.tolist() for p in partials] == [[7], [7, 8, 9]]
    assert isinstance(last, GenerateResult)
    assert last.output_ids.tolist() == [7, 8, 9]
    assert last.logprobs.tolist() == [-7 / 8, -1.0, -9 / 8]


@pytest.mark.parametrize(
    ("parts", "kind", "reason"),
    [
        ([PARTIAL], EngineUnavailableError, "ended before the answer"),
        ([], EngineUnavailableError, "ended before the answer"),
        ([PARTIAL, b"data: [DONE]\n\n"], EngineUnavailableError, "ended before the answer"),
        ([{"error": {"message": "too long"}}], EngineError, "too long"),
        ([b"data: {oops\n\n"], EngineError, "not JSON"),
        ([[1]], EngineError, "/generate"),
        ([{**FINAL, "output_ids": [7]}], EngineError, "1 output ids but 2 log-probs"),
    ],
)
async def test_streams_that_break(parts: list[Any], kind: type[EngineError], reason: str) -> None:
    async with client_of(Streamer(*parts)) as client:
        with pytest.raises(EngineError, match=reason) as caught:
            await results(client)
        assert type(caught.value) is kind


async def test_a_connection_that_dies_in_the_middle() -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(PARTIAL).encode() + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    streamer = Streamer()
    streamer.generate = die  # type: ignore[method-assign]
    async with client_of(streamer) as client:
        with pytest.raises(EngineUnavailableError):
            await results(client)


@pytest.mark.parametrize("status", [400, 503])
async def test_refusals(status: int) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "no room"}, status=status)

    streamer = Streamer()
    streamer.generate = refuse  # type: ignore[method-assign]
    async with client_of(streamer) as client:
        with pytest.raises(EngineError, match="no room") as caught:
            await results(client)
        assert caught.value.status == status
        assert isinstance(caught.value, EngineUnavailableError) == (status == 503)


async def test_an_engine_that_does_not_stream_gives_the_result_alone() -> None:
    async def whole(_: web.Request) -> web.StreamResponse:
        return web.json_response(FINAL)

    streamer = Streamer()
    streamer.generate = whole  # type: ignore[method-assign]
    async with client_of(streamer) as client:
        (only,) = await results(client)
        assert isinstance(only, GenerateResult)


async def test_a_deadline_aborts_the_request() -> None:
    streamer = Streamer(PARTIAL, asyncio.Event())
    async with client_of(streamer, deadlines=Deadlines(generate=0.2)) as client:
        with pytest.raises(DeadlineExceededError):
            await results(client, request_id="mine")
    assert streamer.aborted == [{"rid": "mine"}]


async def test_hanging_up_is_seen_by_the_engine() -> None:
    streamer = Streamer(PARTIAL, asyncio.Event())
    async with client_of(streamer) as client:
        async with aclosing(client.generate_stream([1], PARAMS)) as stream:
            await anext(stream)
        await asyncio.wait_for(streamer.hung_up.wait(), timeout=30)


async def test_generate_on_needs_a_last_result() -> None:
    class Silent:
        url = "silent"

        async def generate_stream(self, *_: Any, **__: Any) -> AsyncGenerator[PartialResult]:
            for part in ():
                yield part

    with pytest.raises(EngineUnavailableError, match="ended before"):
        await generate_on(
            Silent(),  # type: ignore[arg-type]
            [1],
            PARAMS,
            request_id="x",
            routing=False,
            on_partial=lambda _: False,
        )


PAYLOADS = st.binary(max_size=6).map(lambda b: b.replace(b"\n", b".").strip()).filter(lambda b: b != b"[DONE]")


@given(st.lists(PAYLOADS, max_size=6), st.data())
def test_events_are_the_same_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(b"data: " + p + b"\n\n" for p in payloads) + b": comment\n\ndata: [DONE]\n\n"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    buffer = EventBuffer()
    edges = zip([0, *cuts], [*cuts, len(raw)], strict=True)
    assert [event for a, b in edges for event in buffer.feed(raw[a:b])] == payloads


def each(client: EngineClient, **fields: Any) -> AsyncGenerator[tuple[int, GenerateResult], None]:
    """Two prompts in one stream."""
    return client.generate_each([[1, 2], [3]], [PARAMS, PARAMS], request_ids=["x", "y"], **fields)


async def test_each_result_comes_with_its_index() -> None:
    more = asyncio.Event()
    streamer = Streamer(FINAL | {"index": 1}, more, FINAL | {"index": 0}, b"data: [DONE]\n\n")
    async with client_of(streamer) as client, aclosing(each(client)) as answers:
        index, result = await anext(answers)
        assert (index, result.output_ids.tolist()) == (1, [7, 8])
        more.set()
        assert [index async for index, _ in answers] == [0]
    assert streamer.asked["stream"] is True
    assert (streamer.asked["rid"], streamer.asked["input_ids"]) == (["x", "y"], [[1, 2], [3]])


@pytest.mark.parametrize(
    ("parts", "kind", "reason"),
    [
        ([FINAL | {"index": 0}], EngineUnavailableError, "ended before 1 were finished"),
        ([], EngineUnavailableError, "ended before 2 were finished"),
        ([FINAL | {"index": 0}, FINAL | {"index": 0}], EngineError, "prompt 0"),
        ([FINAL | {"index": 2}], EngineError, "prompt 2"),
        ([FINAL], EngineError, "prompt None"),
        ([FINAL | {"index": []}], EngineError, "prompt \\[\\]"),
        ([PARTIAL | {"index": 0}], EngineError, "1 output ids but 0 log-probs"),
        ([b"data: nonsense\n\n"], EngineError, "not JSON"),
    ],
)
async def test_streams_of_several_that_break(parts: list[Any], kind: type[EngineError], reason: str) -> None:
    async with client_of(Streamer(*parts)) as client:
        with pytest.raises(kind, match=reason):
            async for _ in each(client):
                pass


async def test_a_deadline_ends_a_stream_of_several() -> None:
    streamer = Streamer(FINAL | {"index": 0}, asyncio.Event())
    async with client_of(streamer, deadlines=Deadlines(generate=0.2)) as client:
        with pytest.raises(DeadlineExceededError, match="2 generations"):
            async for _ in each(client):
                pass
        await asyncio.wait_for(streamer.hung_up.wait(), 30)


async def test_only_an_engine_that_says_so_streams_batches() -> None:
    for info, able in (
        ({"engine": "miles", "batched_streams": True}, True),
        ({"version": "0.5.23"}, False),
        (None, False),
    ):
        async with client_of(Streamer(), info) as client:
            assert await client.streams_batches() is able
