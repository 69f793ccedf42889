"""Runs an engine inside the test process: the same server, core and client, without the process around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from miles_contracts import WeightGroupFactory
from miles_rollout.engine.cli import bind, build
from miles_rollout.engine.config import EngineConfig
from miles_rollout.engine.core import EngineCore
from miles_rollout.engine_client import EngineClient


@dataclass
class Serving:
    """A running engine."""

    url: str
    core: EngineCore
    client: EngineClient
    runner: web.AppRunner
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded answer of a POST."""
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded answer of a GET."""
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def close(self) -> None:
        """End everything."""
        await self.client.close()
        await self.http.close()
        await asyncio.to_thread(self.core.stop)
        await self.runner.cleanup()


async def serve_engine(
    folder: Path, *, groups: Mapping[str, WeightGroupFactory] | None = None, **options: Any
) -> Serving:
    """Start an engine on a free port; `groups` are ways for weights to come."""
    config = EngineConfig(model_path=folder, port=0, **{"weight_version": "0", **options})
    server = await asyncio.to_thread(build, config, groups)
    runner = web.AppRunner(
        server.application(server.core), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    listener = bind(config.host, 0)
    server.core.start()
    await web.SockSite(runner, listener).start()
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    return Serving(url, server.core, EngineClient(url), runner, aiohttp.ClientSession())


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread brings about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (the other thread sets no event)
            await asyncio.sleep(0.001)
