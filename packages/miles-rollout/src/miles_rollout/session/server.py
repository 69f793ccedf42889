"""SessionServer: a session service listening on a socket, inside whatever event loop starts it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from types import TracebackType
from typing import cast

from aiohttp import web

from miles_contracts import Engine, InvalidFieldError
from miles_rollout.renderers import Renderer
from miles_rollout.router import Router
from miles_rollout.session.config import SessionConfig
from miles_rollout.session.http import make_app
from miles_rollout.session.service import SessionService
from miles_rollout.session.upstream import EngineSampler, RouterSampler, Sampler

_log = logging.getLogger(__name__)
_SHUTDOWN_S = 5.0


class SessionServer:
    """OpenAI chat API in front, token ids behind.

        server = SessionServer(router, renderer, SessionConfig(policy="branching"))
        await server.start()
        ...  # agents talk to f"{server.url}/sessions/{id}/v1"
        await server.stop()

    It lives in the event loop of `start`, so a driver can hold it; `async with` starts and stops it.

    Args:
        upstream: a `Router`, one `Engine`, or anything that is a `Sampler`.
        renderer: the model family's renderer.
        config: policies and limits.
        host: address to listen on; only loopback unless a token guards the server or `insecure` says so.
        port: 0 for any free one.
        token: bearer token that clients must send as their API key.
        insecure: listen on another address than loopback without a token.
        model: name listed to clients.

    Raises:
        InvalidFieldError: an open address without a token, or routing to be recorded without `num_experts`.
    """

    def __init__(
        self,
        upstream: Router | Engine | Sampler,
        renderer: Renderer,
        config: SessionConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        insecure: bool = False,
        model: str = "policy",
    ) -> None:
        if not (token or insecure or _is_loopback(host)):
            raise InvalidFieldError("host", host, "an address that others can reach needs a token")
        if token is not None and not token.strip():
            raise InvalidFieldError("token", token, "an empty token guards nothing; leave it out")
        self.service = SessionService(_sampler(upstream), renderer, config)
        if self.service.config.record_routing and self.service.config.num_experts is None:
            raise InvalidFieldError("num_experts", None, "recording routing needs the number of experts a layer")
        self.token = token
        self._host, self._port, self._model = host, port, model
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL; known once started.

        Raises:
            InvalidFieldError: not started.
        """
        if self._runner is None:
            raise InvalidFieldError("server", "not started", "await start() first")
        return f"http://{'[' + self._host + ']' if ':' in self._host else self._host}:{self._port}"

    def session_url(self, session_id: str) -> str:
        """The base URL that an OpenAI client of this session is given."""
        return f"{self.url}/sessions/{session_id}/v1"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken.
        """
        if self._runner is not None:
            raise InvalidFieldError("server", "running", "start it once")
        app = make_app(self.service, token=self.token, model=self._model)
        # A client that hangs up cancels its request, so that the engine stops sampling for nobody.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port, backlog=1024)
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self._port = runner.addresses[0][1]
        self._runner = runner
        self._sweeper = asyncio.create_task(self._sweep(), name="session-sweep")

    async def stop(self) -> None:
        """Close all sessions and stop listening; idempotent."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self.service.close_all()
        await runner.cleanup()

    async def __aenter__(self) -> SessionServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _sweep(self) -> None:
        interval = min(60.0, max(self.service.config.idle_timeout_s / 4, 0.05))
        while True:
            await asyncio.sleep(interval)
            closed = self.service.sweep()
            if closed:
                _log.info("closed %d idle sessions", closed)


def _sampler(upstream: Router | Engine | Sampler) -> Sampler:
    if isinstance(upstream, Router):
        return RouterSampler(upstream)
    if hasattr(upstream, "begin_weight_update"):  # what an engine has and a sampler has not
        return EngineSampler(cast("Engine", upstream))
    return upstream


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
