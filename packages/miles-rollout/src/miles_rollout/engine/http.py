"""What all HTTP handlers of the engine share: JSON answers, refusals, reading bodies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from miles_contracts import InvalidFieldError, MilesError, WeightUpdateError, wire

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def frame_response(body: Any) -> web.Response:
    """A binary answer: one wire frame (`miles_contracts.wire`), so that arrays need no base64."""
    return web.Response(body=wire.encode(body), content_type=wire.CONTENT_TYPE)


def refusal(error: Exception, status: int) -> web.Response:
    """An error in a form that both SGLang's and our clients read."""
    message = str(error)
    if isinstance(error, WeightUpdateError):
        # Whoever runs the update says what it came to; here only what was wrong with this call.
        message = f"tensor {error.tensor}: {error.reason}" if error.tensor else error.reason
    body: dict[str, Any] = {"success": False, "message": message, "error": {"message": message}}
    if isinstance(error, InvalidFieldError):
        body["field"] = error.field
    if isinstance(error, WeightUpdateError):
        body["tensor"] = error.tensor
    return json_response(body, status)


@web.middleware
async def errors_as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The request boundary: what a caller did wrong is a 400, what we did wrong a 500; the server lives on."""
    try:
        return await handler(request)
    except (InvalidFieldError, WeightUpdateError) as error:
        return refusal(error, 400)
    except web.HTTPException as error:
        return refusal(
            RuntimeError(f"unknown call {request.method} {request.path}" if error.status == 404 else error.reason),
            error.status,
        )
    except MilesError as error:
        return refusal(error, 500)
    except Exception as error:  # noqa: BLE001 (the request boundary)
        _log.exception("%s %s failed", request.method, request.path)
        return refusal(RuntimeError(f"{type(error).__name__}: {error}"), 500)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; {} when there is no body."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidFieldError("body", raw[:60], f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidFieldError("body", type(body).__name__, "send a JSON object")
    return body
