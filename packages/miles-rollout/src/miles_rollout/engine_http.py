"""HTTP to one engine: every wait has a deadline with a name, everything that goes wrong is an error with a name.

What goes wrong is one of three: the engine could not be reached (`EngineUnavailableError`, safe to send elsewhere),
it refused or answered nonsense (`EngineError`), or it was too slow (`DeadlineExceededError`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from miles_contracts import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    InvalidFieldError,
    WireError,
    wire,
)
from miles_rollout.engine_identity import SUPPORTED
from miles_rollout.engine_stream import EventBuffer

T = TypeVar("T")

_OFF_LOOP_BYTES = 1 << 18
"""Answers from this size on are decoded in a thread, so that the event loop keeps turning."""

_KEEP_ALIVE_S = 3.0
"""Idle connections are not used again after this: SGLang closes them after 5 s, while a call may be leaving."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Longest waits in seconds; each is named in the error it raises.

    Attributes:
        connect: opening a connection.
        generate: one whole generation, including the time in the engine's queue and in pauses.
        control: pause, resume, abort, flush, version and health calls.
        weights: one call of a weight update (a bucket, begin, commit, or a load from disk).
    """

    connect: float = 10.0
    generate: float = 3600.0
    control: float = 60.0
    weights: float = 600.0

    def __post_init__(self) -> None:
        for name in ("connect", "generate", "control", "weights"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidFieldError(f"Deadlines.{name}", value, "use a finite number of seconds > 0")


class EngineHttp:
    """Connections to one engine.

    Args:
        url: base URL, for example `http://127.0.0.1:30000`.
        connect_s: longest wait for a connection.

    The pool belongs to the event loop of the first call.

    Raises:
        InvalidFieldError: not a URL.
    """

    def __init__(self, url: str, connect_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidFieldError("EngineClient.url", url, "give a URL like http://127.0.0.1:30000")
        self.url = self.base = url.rstrip("/")
        self.headers: Callable[[], Mapping[str, str]] = dict
        """Gives further headers of the request that is about to be sent."""
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    async def move_to(self, url: str) -> None:
        """Call this base URL from now on; `url` stays what it was, the name of the engine in errors and reports."""
        await self.close()
        self.base = url.rstrip("/")

    async def close(self) -> None:
        """Close the connection pool; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None, what: str, deadline_s: float) -> Any:
        """One request. The answer's JSON, the value of a wire frame, or the text of anything else.

        Args:
            what: what it is for, in words, for errors.
            deadline_s: longest wait for the whole answer.
        """
        data, headers = _encoded(body)
        headers |= self.headers()
        with self._faults(path, what, deadline_s):
            async with asyncio.timeout(deadline_s):
                async with self._pool().request(method, self.base + path, data=data, headers=headers) as response:
                    raw = await response.read()
                    status, content_type = response.status, response.content_type
        if status >= 400:
            raise self._refusal(path, what, status, raw)
        if content_type == wire.CONTENT_TYPE:
            return await self._unframed(path, raw)
        if content_type != "application/json":
            return raw.decode(errors="replace")
        return await self._decoded(path, raw, status)

    async def events(
        self, path: str, body: Mapping[str, Any], what: str, deadline_s: float, *, every: bool
    ) -> AsyncGenerator[Any, None]:
        """The JSON of a streamed answer's events; an answer that is not streamed is one event.

        Args:
            every: whether each event is needed, or, of those that arrive together, only the newest.
        """
        data, headers = _encoded(body)
        headers |= self.headers()
        until = asyncio.get_running_loop().time() + deadline_s
        with self._faults(path, what, deadline_s):
            # A deadline must not be open across a yield: it would cancel whatever the reader does meanwhile.
            async with asyncio.timeout_at(until):
                response = await self._pool().post(self.base + path, data=data, headers=headers)
            async with response:
                if response.status >= 400 or response.content_type != "text/event-stream":
                    async with asyncio.timeout_at(until):
                        raw = await response.read()
                    if response.status >= 400:
                        raise self._refusal(path, what, response.status, raw)
                    yield await self._decoded(path, raw, response.status)
                    return
                events = EventBuffer()
                while True:
                    async with asyncio.timeout_at(until):
                        chunk = await response.content.readany()
                    if not chunk:
                        return
                    whole = list(events.feed(chunk))
                    for event in whole if every else whole[-1:]:
                        yield await self._decoded(path, event, response.status)

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self._session

    @contextmanager
    def _faults(self, path: str, what: str, deadline_s: float) -> Iterator[None]:
        """What goes wrong on the way becomes an error with a name."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"no connection within {self._connect_s:g} s for {what}"
            raise EngineUnavailableError(self.url, reason) from error
        except TimeoutError as error:
            remedy = f"raise the deadline or look at the engine's log ({self.base}{path})"
            raise DeadlineExceededError(f"{what} on {self.url}", deadline_s, remedy) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailableError(self.url, f"{what}: {type(error).__name__}: {error}") from error

    async def _unframed(self, path: str, raw: bytes) -> Any:
        try:
            return await beside_loop(len(raw), wire.decode, raw, Any)
        except WireError as error:
            raise EngineError(self.url, f"{path} answered with a damaged frame: {error}") from error

    async def _decoded(self, path: str, raw: bytes, status: int) -> Any:
        try:
            return await beside_loop(len(raw), msgspec.json.decode, raw)
        except msgspec.DecodeError as error:
            raise EngineError(self.url, f"{path} answered something that is not JSON: {error}", status) from error

    def _refusal(self, path: str, what: str, status: int, raw: bytes) -> EngineError:
        reason = message_of(raw)
        if status == 404 and not reason.startswith("unknown"):
            return EngineError(self.url, f"it has no {path} (needed for {what}); use {SUPPORTED}", status)
        if status in (502, 503, 504):
            return EngineUnavailableError(self.url, f"{what}: {reason}", status)
        return EngineError(self.url, f"{what}: {reason}", status)


async def beside_loop(size: int, decode: Callable[..., T], *args: Any) -> T:
    """Decode something of `size` bytes, in a thread when that takes long."""
    return await asyncio.to_thread(decode, *args) if size >= _OFF_LOOP_BYTES else decode(*args)


def require_success(engine: str, answer: Any) -> None:
    """SGLang says some failures in the body of a 200."""
    if isinstance(answer, dict) and answer.get("success") is False:
        raise EngineError(engine, str(answer.get("message", "the engine reported failure")))


def _plain_int(value: object) -> int:
    """Lets numpy's integers stand among ids, without a pass over a long prompt that has none."""
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to an engine")


def _encoded(body: Mapping[str, Any] | None) -> tuple[bytes | None, dict[str, str]]:
    """A body as bytes, and its headers."""
    if body is None:
        return None, {}
    return msgspec.json.encode(body, enc_hook=_plain_int), {"Content-Type": "application/json"}


def message_of(raw: bytes) -> str:
    """The reason in a refusal: SGLang puts it under `error.message`, `message` or `detail`, or in plain text."""
    text = raw.decode(errors="replace").strip()
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return text[:500] or "no reason given"
    if isinstance(body, dict):
        nested = body.get("error")
        if isinstance(nested, dict) and nested.get("message"):
            return str(nested["message"])
        for key in ("message", "detail", "error"):
            if body.get(key):
                return str(body[key])
    return text[:500] or "no reason given"
