"""The room for a prompt is that of the engine that has least, also of one that comes later; a longer prompt never gets
there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from service_driving import ask, make
from session_factories import user

from miles_rollout.engine_client import EngineClient
from miles_rollout.engine_identity import context_tokens
from miles_rollout.router import Router, RouterConfig
from miles_rollout.session.cli import _check_engines, config_of, make_parser
from miles_rollout.session.context import ContextWindow
from miles_rollout.session.errors import ContextLengthError


@pytest.mark.parametrize(
    ("info", "tokens"),
    [
        ({}, None),
        ({"context_length": 4096}, 4096),
        ({"context_length": 4096, "kv_tokens": 1000}, 1000),
        ({"context_length": None, "max_req_input_len": 2042, "max_total_num_tokens": 99}, 2042),
        ({"context_length": 4096, "max_req_input_len": 2042}, 2042),
        ({"context_length": "4096", "kv_tokens": True, "max_req_input_len": -1}, None),
    ],
)
def test_what_an_engine_says(info: dict[str, object], tokens: int | None) -> None:
    assert context_tokens(info) == tokens


def test_the_smallest_counts_and_what_is_set_wins(caplog: pytest.LogCaptureFixture) -> None:
    window = ContextWindow()
    assert window.tokens is None
    window.note("a", 100)
    window.note("b", 50)
    assert window.tokens == 50
    window.note("b", 200)  # started again with more room
    assert window.tokens == 100
    window.note("a", None)
    assert window.tokens == 200
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    fixed = ContextWindow(60)
    fixed.note("a", 100)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    fixed.note("b", 50)
    assert fixed.tokens == 60
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "a context of 60 tokens is set, and engine b takes 50: it will refuse longer prompts itself"
    ]


def engine_with(info: dict[str, object] | None) -> web.Application:
    app = web.Application()

    async def server_info(request: web.Request) -> web.Response:
        return web.json_response(info) if info is not None else web.Response(status=404)

    async def good(request: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_get("/server_info", server_info)
    app.router.add_get("/{any:.*}", good)
    return app


async def test_engines_are_asked_at_the_start_and_when_they_come() -> None:
    async with TestServer(engine_with({"engine": "miles", "context_length": 500})) as first:
        late = TestServer(engine_with({"engine": "miles", "context_length": 300}))
        await late.start_server()
        port, url = late.port, str(late.make_url("")).rstrip("/")
        await late.close()
        clients = [EngineClient(str(first.make_url("")).rstrip("/")), EngineClient(url)]
        router = Router(clients, config=RouterConfig(health_interval_s=0.02))
        window = ContextWindow()
        await _check_engines(clients, router, window)
        assert window.tokens == 500
        assert router.quarantined == {url: "it did not answer at the start"}
        await router.start()
        again = TestServer(engine_with({"engine": "miles", "context_length": 300}), port=port)
        await again.start_server()
        while router.quarantined:
            assert window.tokens in (300, 500)
            await asyncio.sleep(0.01)
        assert window.tokens == 300, "known before it serves"
        await router.close()
        await again.close()
        for client in clients:
            await client.close()


async def test_an_engine_without_the_call_says_nothing() -> None:
    async with TestServer(engine_with(None)) as engine:
        client = EngineClient(str(engine.make_url("")).rstrip("/"))
        window = ContextWindow()
        await _check_engines([client], Router([client]), window)
        assert window.tokens is None
        await client.close()


async def test_a_prompt_without_room_is_refused_before_an_engine_sees_it(renderer) -> None:
    service, engine = make(renderer)
    service.context.note("scripted", 60)
    session = service.open()
    with pytest.raises(ContextLengthError, match="maximum context length is 60 tokens, and the prompt has ") as caught:
        await ask(service, session, [user("x" * 80)])
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "messages"
    with pytest.raises(ContextLengthError) as caught:
        await service.complete(session.id, b'{"prompt": [' + b"1," * 60 + b"1]}")
    assert caught.value.param == "prompt"
    assert engine.calls == []


async def test_a_budget_that_was_cut_is_told(renderer) -> None:
    service, engine = make(renderer)
    service.context.note("scripted", 60)
    whole = await ask(service, service.open(), [user("x")], max_tokens=5)
    assert "max_tokens" not in whole["choices"][0]["miles"]
    cut = await ask(service, service.open(), [user("x")], max_tokens=500)
    prompt, params = engine.calls[-1]
    assert cut["choices"][0]["miles"]["max_tokens"] == params.max_new_tokens == 60 - len(prompt)


def test_the_option_stays_an_override(model_dir: Path) -> None:
    words = ["--engine", "http://127.0.0.1:1", "--model", str(model_dir)]
    assert config_of(make_parser().parse_args(words)).max_context_tokens is None
    assert config_of(make_parser().parse_args([*words, "--max-context-tokens", "99"])).max_context_tokens == 99
