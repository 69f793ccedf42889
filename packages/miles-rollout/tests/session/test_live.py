"""Streams that begin before the answer is finished: what is shown, when, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_factories import WEATHER, ScriptedEngine, body, user
from session_serving import CALL, open_session

from miles_contracts import EngineError, EngineUnavailableError, GenerateResult, SamplingParams
from miles_rollout.engine_stream import PartialResult
from miles_rollout.parsers import ParsedMessage
from miles_rollout.router import Router
from miles_rollout.session import SessionConfig, SessionServer
from miles_rollout.session.live import Delta, LiveTurn
from miles_rollout.session.prompting import cut_at_stop


class GrowingEngine(ScriptedEngine):
    """Shows its answer token by token; `more` lets it go on behind the first `pause_at` of them."""

    def __init__(self, renderer: Any, replies: Sequence[Any] = (), *, pause_at: int = 5) -> None:
        super().__init__(renderer, replies)
        self.more = asyncio.Event()
        self.pause_at = pause_at
        self.failure: Exception | None = None
        self.spoil: Callable[[GenerateResult], GenerateResult] = lambda result: result

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
        for count in range(1, len(result.output_ids) + 1):
            if count > self.pause_at:
                await self.more.wait()
                if self.failure is not None:
                    raise self.failure
            yield PartialResult(np.asarray(result.output_ids[:count]))
            await asyncio.sleep(0)
        yield self.spoil(result)


@asynccontextmanager
async def streaming(
    renderer: Any, replies: Sequence[Any], *, routed: bool = False, pause_at: int = 5, **config: Any
) -> AsyncIterator[tuple[SessionServer, GrowingEngine]]:
    engine = GrowingEngine(renderer, replies, pause_at=pause_at)
    upstream: Any = Router([engine]) if routed else engine
    async with SessionServer(upstream, renderer, SessionConfig(**config)) as server:
        yield server, engine


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Each event's JSON, and "[DONE]"."""
    async for line in response.content:
        if line.strip():
            data = line.decode().removeprefix("data: ").strip()
            yield data if data == "[DONE]" else json.loads(data)


async def post(http: aiohttp.ClientSession, server: SessionServer, **fields: Any) -> aiohttp.ClientResponse:
    url = server.session_url(await open_session(http, server))
    return await http.post(f"{url}/chat/completions", data=body([user("hi")], stream=True, **fields))


def text_of(events: Sequence[Any], name: str = "content") -> str:
    return "".join(e["choices"][0]["delta"].get(name) or "" for e in events if e != "[DONE]" and e["choices"])


@pytest.mark.parametrize("routed", [False, True])
async def test_content_arrives_while_the_engine_samples(renderer, routed: bool) -> None:
    async with streaming(renderer, ["Hello there"], routed=routed) as (server, engine), aiohttp.ClientSession() as http:
        response = await post(http, server, stream_options={"include_usage": True})
        events, iterator = [], events_of(response)
        while text_of(events) != "Hello":
            events.append(await anext(iterator))
        (session,) = server.service._sessions.values()
        assert session.tree.nodes == []  # nothing is committed before the answer is there
        engine.more.set()
        events += [event async for event in iterator]
        assert events[-1] == "[DONE]"
        assert text_of(events) == "Hello there" == session.last_reply()
        assert len({e["id"] for e in events[:-1]}) == 1
        assert [e["choices"][0]["delta"].get("role") for e in events[:2]] == ["assistant", None]
        assert events[-2]["usage"]["completion_tokens"] == len(engine.ids_of("Hello there")) + 1
        assert all(e["usage"] is None for e in events[:-2])
        assert events[-3]["choices"][0]["finish_reason"] == "stop"
        (node,) = session.tree.nodes
        ((_, said, _),) = engine.said.values()
        assert node.sampled.output_ids.tolist() == said


async def test_reasoning_and_calls_never_show_as_content(renderer) -> None:
    async with streaming(renderer, [CALL, CALL], pause_at=10**6) as (server, _), aiohttp.ClientSession() as http:
        live = [e async for e in events_of(await post(http, server, tools=[WEATHER]))]
        assert text_of(live) == "One moment. "
        assert text_of(live, "reasoning_content") == "look it up"
        calls = [c for e in live[:-1] for c in e["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Oslo"}'
        kinds = [next(iter(e["choices"][0]["delta"]), "end") for e in live[:-1]]
        assert kinds[:3] == ["role", "reasoning_content", "content"]


async def test_calls_that_nobody_wants_stream_as_content(renderer) -> None:
    async with streaming(renderer, [CALL], pause_at=10**6) as (server, _), aiohttp.ClientSession() as http:
        events = [e async for e in events_of(await post(http, server, tools=[WEATHER], tool_choice="none"))]
        (session,) = server.service._sessions.values()
        reply = session.tree.nodes[0].reply
        assert text_of(events) == reply.content
        assert reply.content.startswith("One moment. <tool_call>")
        assert text_of(events, "reasoning_content") == reply.reasoning_content == "look it up"
        assert not reply.tool_calls
        assert len([e for e in events[:-1] if e["choices"][0]["delta"].get("content")]) > 3  # while it was sampled


@pytest.mark.parametrize("text", ["Hello there", "naïve 🙂 end", "one STOP two"])
async def test_text_completions_stream_while_the_engine_samples(renderer, text: str) -> None:
    async with streaming(renderer, [text]) as (server, engine), aiohttp.ClientSession() as http:
        url = server.session_url(await open_session(http, server))
        fields = {"prompt": [1, 2, 3], "stream": True, "stop": ["STOP"], "stream_options": {"include_usage": True}}
        response = await http.post(f"{url}/completions", json=fields)
        iterator = events_of(response)
        events = [await anext(iterator)]
        (session,) = server.service._sessions.values()
        assert session.tree.nodes == []  # nothing is committed before the answer is there
        engine.more.set()
        events += [event async for event in iterator]
        assert events[-1] == "[DONE]"
        shown = "".join(e["choices"][0]["text"] for e in events[:-1] if e["choices"])
        assert shown == text.partition("STOP")[0]
        (node,) = session.tree.nodes
        assert events[-3]["choices"][0]["token_ids"] == node.sampled.output_ids.tolist()
        assert events[-2]["usage"]["completion_tokens"] == len(node.sampled.output_ids)
        assert len({e["id"] for e in events[:-1]}) == 1


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineUnavailableError("e", "died"), "engine_unavailable"),
        (EngineError("e", "no", 400), "engine_refused"),
        (EngineError("e", "no", 500), "engine_error"),
    ],
)
async def test_a_failure_in_the_middle_ends_the_stream(renderer, routed: bool, failure: Exception, code: str) -> None:
    async with streaming(renderer, ["Hello there"], routed=routed) as (server, engine), aiohttp.ClientSession() as http:
        response = await post(http, server)
        engine.failure = failure
        assert response.status == 200
        engine.more.set()
        events = [event async for event in events_of(response)]
        assert events[-1]["error"]["code"] == code
        assert "[DONE]" not in events
        assert text_of(events[:-1]) == "Hello"
        (session,) = server.service._sessions.values()
        assert session.tree.nodes == []
        assert len(engine.calls) == 1  # what is out cannot be sampled anew
        assert f'errors_total{{code="{code}"}} 1' in server.service.metrics_text()


async def test_a_failure_before_the_first_piece_keeps_its_status(renderer) -> None:
    async with streaming(renderer, ["Hello"], pause_at=0) as (server, engine), aiohttp.ClientSession() as http:
        engine.failure = EngineUnavailableError("e", "died")
        engine.more.set()
        response = await post(http, server)
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "engine_unavailable"


async def test_an_answer_that_does_not_verify_is_not_kept(renderer) -> None:
    def spoil(result: GenerateResult) -> GenerateResult:
        return GenerateResult(
            output_ids=result.output_ids,
            logprobs=-result.logprobs,
            version_spans=result.version_spans,
            finish_reason=result.finish_reason,
            request_id=result.request_id,
        )

    async with streaming(renderer, ["Hello"], pause_at=99) as (server, engine), aiohttp.ClientSession() as http:
        engine.spoil = spoil
        events = [event async for event in events_of(await post(http, server))]
        assert text_of(events[:-1]) == "Hello"
        assert "positive" in events[-1]["error"]["message"]
        (session,) = server.service._sessions.values()
        assert (session.tree.nodes, session.counters().discarded_turns) == ([], 1)


@pytest.mark.parametrize("routed", [False, True])
async def test_a_client_that_hangs_up_aborts_the_request(renderer, routed: bool) -> None:
    async with streaming(renderer, ["Hello there"], routed=routed) as (server, engine), aiohttp.ClientSession() as http:
        response = await post(http, server)
        await anext(events_of(response))
        response.close()
        async with asyncio.timeout(30):
            while not engine.aborted:  # noqa: ASYNC110 - the engine offers no event for it
                await asyncio.sleep(0.001)
        (session,) = server.service._sessions.values()
        assert session.tree.nodes == []
        assert not session.in_flight


async def test_a_session_that_is_deleted_ends_its_stream(renderer) -> None:
    async with streaming(renderer, ["Hello there"]) as (server, _), aiohttp.ClientSession() as http:
        iterator = events_of(await post(http, server))
        events = [await anext(iterator)]
        server.service.close_all()
        events += [event async for event in iterator]
        assert events[-1]["error"]["code"] == "session_not_found"


async def test_live_streams_can_be_switched_off(renderer) -> None:
    async with streaming(renderer, ["Hello"], live_streams=False) as (server, engine), aiohttp.ClientSession() as http:
        engine.generate_stream = None  # type: ignore[method-assign,assignment]  # would fail if it were asked
        events = [event async for event in events_of(await post(http, server))]
        assert text_of(events) == "Hello"


async def test_whoever_does_not_stream_gets_the_whole(renderer) -> None:
    async with streaming(renderer, ["Hello"]) as (server, engine), aiohttp.ClientSession() as http:
        engine.generate_stream = None  # type: ignore[method-assign,assignment]
        url = server.session_url(await open_session(http, server))
        async with http.post(f"{url}/chat/completions", data=body([user("hi")])) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "Hello"


PIECES = [
    *("a", "the", " ", "\n", "é", "😀", "STOP", "ST", "<", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    '{"name": "f", "arguments": {}}',
    "<|im_start|>",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    ended=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("STOP", "a\n")]),
    thinking=st.sampled_from([None, False]),
    data=st.data(),
)
def test_deltas_are_the_beginning_of_the_finished_turn(renderer, pieces, ended, stop, thinking, data) -> None:
    renderer = renderer.with_options(thinking=thinking)
    ids = ScriptedEngine(renderer).ids_of("".join(pieces)) + [renderer.vocabulary.id("<|im_end|>")] * ended
    deltas: list[Delta] = []
    view = LiveTurn(renderer, stop, deltas.append)
    for end in sorted(data.draw(st.sets(st.integers(0, len(ids))))):
        shown = view.advance(np.asarray(ids[:end], dtype=np.int32))
        assert shown == bool(deltas)
    parsed = renderer.parse(ids, [WEATHER])
    final = view.settle(parsed, ids)
    content = cut_at_stop(final.content, stop) if not final.tool_calls else final.content
    assert content.startswith("".join(d.content for d in deltas))
    reasoning = [d.reasoning_content for d in deltas if d.reasoning_content is not None]
    assert reasoning in ([], [final.reasoning_content])
    if "</think>" not in pieces:
        assert final == parsed


def view_of(renderer: Any, *texts: str | list[int]) -> tuple[LiveTurn, list[str]]:
    seen: list[str] = []
    view = LiveTurn(renderer, ("STOP",), lambda delta: seen.append(delta.content))
    for text in texts:
        ids = ScriptedEngine(renderer).ids_of(text) if isinstance(text, str) else text
        view.advance(np.asarray(ids, dtype=np.int32))
    return view, seen


def test_half_a_character_waits(renderer) -> None:
    ids = ScriptedEngine(renderer).ids_of("a😀b")
    assert len(ids) == 6
    assert view_of(renderer, *(ids[:n] for n in range(1, 7)))[1] == ["a", "😀", "b"]


def test_what_may_become_a_stop_string_waits(renderer) -> None:
    assert view_of(renderer, "so ST", "so STO", "so STAY", "so STAY STOP", "so STAY STOP it")[1] == ["so ", "STAY", " "]


def test_a_reasoning_that_was_never_opened_stays_content_once_shown(renderer) -> None:
    text = "Hello</think>there"
    view, seen = view_of(renderer, "Hel", text)
    assert seen == ["Hel"]
    ids = ScriptedEngine(renderer).ids_of(text)
    assert view.settle(renderer.parse(ids), ids) == ParsedMessage(content=text)


def test_ids_that_do_not_exist_are_left_to_the_final_check(renderer) -> None:
    assert view_of(renderer, [10**6], [-1])[1] == []
