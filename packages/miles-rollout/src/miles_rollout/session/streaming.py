"""One streamed answer on its connection: pieces while the turn runs, then the rest, or the error that ended it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

from aiohttp import web

from miles_rollout.session.errors import SessionError
from miles_rollout.session.live import Delta
from miles_rollout.session.requests import SamplingFields
from miles_rollout.session.responses import Answer, ChatStream, TextStream, error_event

EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class StreamedResponse:
    """Begins its HTTP answer with the first delta, so that whatever fails earlier still gets a status of its own.

    Deltas are taken at once and written by a task: the engine's answer is never read slower for a slow client.

    Args:
        request: the HTTP request.
        events: makes the events of a completion of this id.
    """

    def __init__(self, request: web.Request, events: type[ChatStream] | type[TextStream]) -> None:
        self._request = request
        self._events = events
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._writer: asyncio.Task[web.StreamResponse] | None = None
        self._stream: ChatStream | TextStream | None = None

    @property
    def started(self) -> bool:
        """Whether the client is being sent a stream already."""
        return self._writer is not None

    def on_delta(self, asked: SamplingFields, delta: Delta) -> None:
        """Send a piece of the turn."""
        if self._stream is None:
            name = f"chatcmpl-{self._request.match_info['id'][:8]}-{secrets.token_hex(8)}"
            self._stream = self._events(name, asked)
            self._writer = asyncio.create_task(self._write(self._stream), name=name)
        self._deltas.put_nowait(delta)

    async def finish(self, answer: Answer, asked: SamplingFields) -> web.StreamResponse:
        """Send what is left of a committed turn."""
        stream = self._stream or self._events(answer.id, asked)
        return await self._end(stream.rest(answer))

    async def fail(self, error: SessionError) -> web.StreamResponse:
        """End a stream that has begun with an error."""
        return await self._end([error_event(error)])

    def close(self) -> None:
        """Stop writing, for a client that is gone."""
        if self._writer is not None:
            self._writer.cancel()

    async def _end(self, events: Iterable[bytes]) -> web.StreamResponse:
        self._deltas.put_nowait(None)
        response = await (self._begin() if self._writer is None else self._writer)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    async def _write(self, stream: ChatStream | TextStream) -> web.StreamResponse:
        response = await self._begin()
        while (delta := await self._deltas.get()) is not None:
            for event in stream.piece(delta):
                await response.write(event)
        return response

    async def _begin(self) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENT_STREAM)
        await response.prepare(self._request)
        return response
