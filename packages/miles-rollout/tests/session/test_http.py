"""The server over its socket: the official client, streams, limits, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from session_factories import WEATHER, ScriptedEngine, body, user

from miles_contracts import EngineUnavailableError, InvalidFieldError, Trajectory, wire
from miles_rollout.session import SessionConfig, SessionServer, audit


@asynccontextmanager
async def serving(renderer, replies=(), *, token=None, **config) -> AsyncIterator[tuple[SessionServer, ScriptedEngine]]:
    engine = ScriptedEngine(renderer, replies)
    async with SessionServer(engine, renderer, SessionConfig(**config), token=token) as server:
        yield server, engine


async def open_session(http: aiohttp.ClientSession, server: SessionServer, **fields) -> str:
    async with http.post(f"{server.url}/sessions", json=fields) as response:
        assert response.status == 200
        return (await response.json())["session_id"]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - the server offers no event for it
            await asyncio.sleep(0.001)


async def test_life_of_a_session(renderer) -> None:
    async with serving(renderer, ["Hello"]) as (server, engine), aiohttp.ClientSession() as http:
        async with http.post(f"{server.url}/sessions") as response:
            opened = await response.json()
        assert len(opened["session_id"]) >= 32
        url = f"{server.url}{opened['base_url']}"
        async with http.post(f"{url}/chat/completions", data=body([user("hi")])) as response:
            answer = await response.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"] == "Hello"
        assert answer["usage"]["total_tokens"] == len(engine.calls[0][0]) + 6
        async with http.get(f"{server.url}/sessions/{opened['session_id']}/trajectories") as response:
            (trajectory,) = wire.decode(await response.read(), list[Trajectory])
        assert audit([trajectory]).mismatches == 0
        assert trajectory.identity.session_id == opened["session_id"]
        async with http.get(f"{server.url}/sessions/{opened['session_id']}") as response:
            described = await response.json()
        assert described["nodes"][0]["sampled_tokens"] == 6
        assert [m["role"] for m in described["messages"]] == ["user", "assistant"]
        async with http.get(f"{url}/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        async with http.delete(f"{server.url}/sessions/{opened['session_id']}") as response:
            assert response.status == 204
        async with http.delete(f"{server.url}/sessions/{opened['session_id']}") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "session_not_found"
        async with http.get(f"{server.url}/health") as response:
            assert await response.json() == {"status": "ok", "sessions": 0}
        async with http.get(f"{server.url}/metrics") as response:
            text = await response.text()
        assert "miles_session_turns_total 1" in text
        assert "miles_session_trajectories_total 1" in text
        assert 'miles_session_errors_total{code="session_not_found"} 1' in text
        assert 'miles_session_turn_seconds_bucket{le="+Inf"} 1' in text


async def test_usage_tells_cached_tokens(renderer) -> None:
    async with serving(renderer) as (server, engine), aiohttp.ClientSession() as http:
        engine.cached = 4
        url = server.session_url(await open_session(http, server))
        async with http.post(f"{url}/chat/completions", data=body([user("hi")])) as response:
            assert (await response.json())["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_errors_have_openai_form(renderer) -> None:
    async with serving(renderer, max_body_bytes=2000) as (server, engine), aiohttp.ClientSession() as http:
        session_id = await open_session(http, server)
        url = server.session_url(session_id)

        async def post(path: str, data: bytes) -> tuple[int, dict]:
            async with http.post(path, data=data) as response:
                return response.status, (await response.json())["error"]

        assert (await post(f"{url}/chat/completions", b"{"))[1]["type"] == "invalid_request_error"
        status, error = await post(f"{url}/chat/completions", body([user("x" * 5000)]))
        assert (status, error["code"]) == (413, "body_too_large")
        assert "2000 bytes" in error["message"]
        assert (await post(f"{url}/nonsense", b""))[0] == 404
        assert (await post(f"{server.url}/sessions", b'{"polcy": "linear"}'))[0] == 400
        assert (await post(f"{server.url}/sessions", b'{"sampling": {"top_p": 7}}'))[0] == 400
        engine.replies = [EngineUnavailableError("e", "down"), RuntimeError("a bug")]
        status, error = await post(f"{url}/chat/completions", body([user("x")]))
        assert (status, error["code"]) == (503, "engine_unavailable")
        assert "unchanged" in error["message"]
        status, error = await post(f"{url}/chat/completions", body([user("x")]))
        assert (status, error["code"]) == (500, "internal_error")
        assert "a bug" not in error["message"]


async def test_a_token_guards_the_sessions(renderer) -> None:
    async with serving(renderer, token="secret") as (server, _), aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            async with http.post(f"{server.url}/sessions", headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with http.post(f"{server.url}/sessions", headers={"Authorization": "Bearer secret"}) as response:
            assert response.status == 200
        async with http.get(f"{server.url}/health") as response:
            assert response.status == 200


def test_it_binds_to_loopback_unless_guarded(renderer) -> None:
    engine = ScriptedEngine(renderer)
    with pytest.raises(InvalidFieldError, match="needs a token"):
        SessionServer(engine, renderer, host="0.0.0.0")
    with pytest.raises(InvalidFieldError, match="guards nothing"):
        SessionServer(engine, renderer, token=" ")
    with pytest.raises(InvalidFieldError, match="num_experts"):
        SessionServer(engine, renderer, SessionConfig(record_routing=True))
    SessionServer(engine, renderer, host="0.0.0.0", token="secret")
    SessionServer(engine, renderer, host="0.0.0.0", insecure=True)
    SessionServer(engine, renderer, host="::1")
    with pytest.raises(InvalidFieldError, match="await start"):
        _ = SessionServer(engine, renderer).url


async def test_a_client_that_hangs_up_leaves_no_trace(renderer) -> None:
    async with serving(renderer) as (server, engine), aiohttp.ClientSession() as http:
        session_id = await open_session(http, server)
        engine.gate = asyncio.Event()
        url = f"{server.session_url(session_id)}/chat/completions"
        asked = asyncio.create_task(http.post(url, data=body([user("x")])))
        await until(lambda: engine.calls)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: engine.aborted)
        engine.gate.set()
        assert server.service.get(session_id).tree.nodes == []
        async with http.post(url, data=body([user("x")])) as response:
            assert response.status == 200


async def test_idle_sessions_end(renderer) -> None:
    async with serving(renderer, idle_timeout_s=0.05) as (server, _), aiohttp.ClientSession() as http:
        await open_session(http, server)
        await until(lambda: server.service.num_sessions == 0)


CALL = (
    "<think>\nlook it up\n</think>\n\nOne moment. "
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


async def test_the_stream_says_the_same_as_the_whole(renderer) -> None:
    async with serving(renderer, [CALL, CALL]) as (server, _), aiohttp.ClientSession() as http:
        url = server.session_url(await open_session(http, server))
        ask = body([user("x" * 100)], tools=[WEATHER], stream=True, stream_options={"include_usage": True})
        async with http.post(f"{url}/chat/completions", data=ask) as response:
            assert response.content_type == "text/event-stream"
            raw = (await response.read()).decode()
        lines = [line for line in raw.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
        assert "".join(d.get("content") or "" for d in deltas).strip() == "One moment."
        assert "".join(d.get("reasoning_content") or "" for d in deltas).strip() == "look it up"
        calls = [c for d in deltas for c in d.get("tool_calls", ())]
        assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Oslo"}'
        assert events[-1]["usage"]["completion_tokens"] > 0
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


openai = pytest.importorskip("openai")


async def test_the_official_client_with_tools(renderer) -> None:
    async with serving(renderer, [CALL, "It rains."], token="secret") as (server, engine):
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http:
            session_id = await open_session(http, server)
        client = openai.AsyncOpenAI(base_url=server.session_url(session_id), api_key="secret", max_retries=0)
        messages: list = [{"role": "user", "content": "Weather in Oslo?"}]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER], logprobs=True)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        assert len(choice.logprobs.content) == first.usage.completion_tokens
        assert choice.logprobs.content[0].token == "<think>"
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "content": "rain", "tool_call_id": choice.message.tool_calls[0].id})
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "It rains."
        with pytest.raises(openai.BadRequestError, match="differs from the stored history"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "edited"}], tools=[WEATHER]
            )
        (trajectory,) = server.service.trajectories(session_id)
        assert trajectory.num_trained == sum(len(s) for _, s, _ in engine.said.values())
        assert server.service.get(session_id).counters().repairs == {}
        await client.close()


async def test_the_official_client_streams(renderer) -> None:
    async with serving(renderer, [CALL, "It rains in Oslo. " * 20]) as (server, engine):
        session = server.service.open()
        client = openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0)
        messages: list = [{"role": "user", "content": "Weather in Oslo?"}]
        async with client.chat.completions.stream(model="policy", messages=messages, tools=[WEATHER]) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        message = final.choices[0].message
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": c.id,
                        "type": "function",
                        "function": {"name": c.function.name, "arguments": c.function.arguments},
                    }
                    for c in message.tool_calls
                ],
            }
        )
        messages.append({"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id})
        chunks = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER], stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(pieces) == "It rains in Oslo. " * 20
        assert len(pieces) > 3
        (trajectory,) = session.trajectories(None)
        assert trajectory.num_trained == sum(len(s) for _, s, _ in engine.said.values())
        assert session.counters().repairs == {"reasoning_omitted": 1}
        await client.close()


async def test_the_official_client_completes_ids(renderer) -> None:
    async with serving(renderer, [[70, 71], [72]]) as (server, _):
        session = server.service.open()
        client = openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0)
        answer = await client.completions.create(model="policy", prompt=[65, 66], logprobs=1)
        assert answer.choices[0].model_extra["token_ids"] == [70, 71]
        assert len(answer.choices[0].logprobs.token_logprobs) == 2
        texts = []
        async for chunk in await client.completions.create(
            model="policy", prompt=[65, 66, 70, 71, 66], stream=True, stream_options={"include_usage": True}
        ):
            texts += [c.text for c in chunk.choices]
        (trajectory,) = session.trajectories(None)
        assert trajectory.token_ids.tolist() == [65, 66, 70, 71, 66, 72]
        assert "".join(texts) == renderer.decode([72])
        await client.close()
