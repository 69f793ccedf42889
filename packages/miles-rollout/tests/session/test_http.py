"""The server over its socket: the official client, streams, limits, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest
from session_factories import WEATHER, ScriptedEngine, body, user
from session_serving import CALL, open_session, serving

from miles_contracts import EngineUnavailableError, InvalidFieldError, Trajectory, wire
from miles_rollout.session import SessionConfig, SessionServer, audit


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
