"""A session server in front of a scripted engine, on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from session_factories import ScriptedEngine

from miles_rollout.session import SessionConfig, SessionServer

CALL = (
    "<think>\nlook it up\n</think>\n\nOne moment. "
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


@asynccontextmanager
async def serving(renderer, replies=(), *, token=None, **config) -> AsyncIterator[tuple[SessionServer, ScriptedEngine]]:
    engine = ScriptedEngine(renderer, replies)
    async with SessionServer(engine, renderer, SessionConfig(**config), token=token) as server:
        yield server, engine


async def open_session(http: aiohttp.ClientSession, server: SessionServer, **fields) -> str:
    async with http.post(f"{server.url}/sessions", json=fields) as response:
        assert response.status == 200
        return (await response.json())["session_id"]
