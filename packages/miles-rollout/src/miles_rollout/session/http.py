"""The HTTP face of the session service: routes, the bearer token, limits, errors in OpenAI's form.

POST   /sessions                               open; body optional (see `requests.OpenRequest`)
GET    /sessions/{id}                          turns, leaves, counters
DELETE /sessions/{id}
GET    /sessions/{id}/trajectories             a wire frame of list[Trajectory]
POST   /sessions/{id}/v1/chat/completions      OpenAI chat
POST   /sessions/{id}/v1/completions           OpenAI text completions, token ids only
GET    /sessions/{id}/v1/models                what clients probe for
GET    /health, /metrics                       open to everybody
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from miles_contracts import wire
from miles_rollout.session.errors import BadRequestError, BodyTooLargeError, SessionError, UnauthorizedError
from miles_rollout.session.requests import OpenBody, SamplingFields, decode_body
from miles_rollout.session.responses import Answer, ChatStream, TextStream, chat_body, completion_body
from miles_rollout.session.service import SessionService
from miles_rollout.session.streaming import StreamedResponse
from miles_rollout.session.turns import OnDelta

_log = logging.getLogger(__name__)
_OPEN = msgspec.json.Decoder(OpenBody)
_OFF_LOOP_BYTES = 4 << 20
"""Frames from this size on are written in a thread, so that the event loop keeps turning."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Serve = Callable[[str, bytes, OnDelta], Awaitable[tuple[Answer, SamplingFields]]]


def make_app(service: SessionService, *, token: str | None = None, model: str = "policy") -> web.Application:
    """The aiohttp application of a service.

    Args:
        service: serves the requests.
        token: bearer token that sessions need, None for none.
        model: name listed under `/v1/models`.
    """
    routes = _Routes(service, model)
    app = web.Application(middlewares=[_guard(service, token)], client_max_size=service.config.max_body_bytes)
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/metrics", routes.metrics),
            web.post("/sessions", routes.open),
            web.get("/sessions/{id}", routes.describe),
            web.delete("/sessions/{id}", routes.delete),
            web.get("/sessions/{id}/trajectories", routes.trajectories),
            web.get("/sessions/{id}/v1/models", routes.models),
            web.post("/sessions/{id}/v1/chat/completions", routes.chat),
            web.post("/sessions/{id}/v1/completions", routes.complete),
        ]
    )
    return app


def _guard(service: SessionService, token: str | None) -> Any:
    """Checks the token, and turns whatever is raised into an OpenAI error."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token is not None and request.path not in ("/health", "/metrics"):
                _check_token(request, token)
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            refused = BadRequestError(f"{request.method} {request.path}: {error.reason}")
            service.metrics.error(f"http_{error.status}")
            return _json(refused.to_dict(), error.status)
        except Exception as error:  # noqa: BLE001 - the request boundary: one request's bug is that request's error
            failure = _reported(service, request, error)
            return _json(failure.to_dict(), failure.status)

    return guard


def _reported(service: SessionService, request: web.Request, error: Exception) -> SessionError:
    """What the client is told of a failure; it is counted, and logged if it is a bug."""
    if not isinstance(error, SessionError):
        _log.error("%s %s failed", request.method, request.path, exc_info=error)
        error = SessionError("internal error of the session server; its log has the details")
    service.metrics.error(error.code)
    return error


def _check_token(request: web.Request, token: str) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise UnauthorizedError("send this server's token as `Authorization: Bearer <token>` (the client's api_key)")


class _Routes:
    def __init__(self, service: SessionService, model: str) -> None:
        self._service = service
        self._model = model

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "sessions": self._service.num_sessions})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._service.metrics_text(), content_type="text/plain")

    async def models(self, request: web.Request) -> web.Response:
        self._service.get(request.match_info["id"])
        model: dict[str, Any] = {"id": self._model, "object": "model", "owned_by": "miles"}
        if self._service.context.tokens is not None:
            model["max_model_len"] = self._service.context.tokens
        return _json({"object": "list", "data": [model]})

    async def open(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        session = self._service.open(decode_body(body, _OPEN) if body.strip() else None)
        answer = {
            "session_id": session.id,
            "policy": str(session.tree.policy),
            "base_url": f"/sessions/{session.id}/v1",
        }
        return _json(answer)

    async def describe(self, request: web.Request) -> web.Response:
        return _json(self._service.get(request.match_info["id"]).describe())

    async def delete(self, request: web.Request) -> web.Response:
        self._service.close(request.match_info["id"])
        return web.Response(status=204)

    async def trajectories(self, request: web.Request) -> web.Response:
        found = self._service.trajectories(request.match_info["id"])
        size = sum(t.token_ids.nbytes + (t.routing.num_bytes if t.routing else 0) for t in found)
        frame = await asyncio.to_thread(wire.encode, found) if size > _OFF_LOOP_BYTES else wire.encode(found)
        return web.Response(body=frame, content_type="application/octet-stream")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, self._service.chat, StreamedResponse(request, ChatStream), chat_body)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, self._service.complete, StreamedResponse(request, TextStream), completion_body)

    async def _turn(
        self, request: web.Request, serve: _Serve, stream: StreamedResponse, whole: Callable[[Answer], bytes]
    ) -> web.StreamResponse:
        started = time.perf_counter()
        body = await self._body(request)
        try:
            try:
                answer, asked = await serve(request.match_info["id"], body, stream.on_delta)
            except Exception as error:  # the request boundary again: the status is out, only an event can say it
                if not stream.started:
                    raise
                return await stream.fail(_reported(self._service, request, error))
            if asked.stream:
                response: web.StreamResponse = await stream.finish(answer, asked)
            else:
                response = web.Response(body=whole(answer), content_type="application/json")
        finally:
            stream.close()
        self._service.metrics.observe("turn_seconds", time.perf_counter() - started)
        return response

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._service.config.max_body_bytes
            raise BodyTooLargeError(f"the body is larger than {limit} bytes; raise max_body_bytes") from error


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
