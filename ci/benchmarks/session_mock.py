"""An engine that answers at once, and a client that costs next to nothing: what is left is the session server.

Both speak just enough HTTP/1.1 over asyncio streams; neither parses a history.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable

import msgspec

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_ROWS_FROM = re.compile(rb'"routed_experts_start_len":(\d+)')
_RID = b'"rid":"'


class MockEngine(asyncio.Protocol):
    """SGLang's `/generate`, always with the same completion.

    Args:
        output_ids: what is sampled, stop token included.
        routing_bytes: bytes of routing (int32 expert ids) for each token fed, 0 for none.
    """

    def __init__(self, output_ids: list[int], routing_bytes: int = 0) -> None:
        n = len(output_ids)
        meta = {
            "prompt_tokens": 0,
            "completion_tokens": n,
            "cached_tokens": 0,
            "finish_reason": {"type": "stop", "matched": output_ids[-1]},
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": n}],
            "output_token_logprobs": [[-0.5, i, None] for i in output_ids],
        }
        self._head = f'{{"text":"","output_ids":{json.dumps(output_ids)},"meta_info":{json.dumps(meta)[:-1]}'.encode()
        self._new = n
        self._routing_bytes = routing_bytes
        self._routes = b""
        self._buffer = bytearray()
        self._path = b""  # of a request whose body is awaited
        self._need = 1  # bytes until there is something to do
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=1 << 26)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._need:
            if self._path == b"":
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = bytes(self._buffer[:end])
                del self._buffer[: end + 4]
                found = _LENGTH.search(head)
                self._path, self._need = head[: head.find(b"\r\n")], int(found.group(1)) if found else 0
            else:
                path, body = self._path, bytes(self._buffer[: self._need])
                del self._buffer[: self._need]
                self._path, self._need = b"", 1
                self._answer(path, body)

    def _answer(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if b"/generate" not in path:
            payload = b"{}"
        else:
            # What is looked for stands behind the ids: a search from the end does not read those.
            named = body.rfind(_RID) + len(_RID)
            parts = [self._head, b',"id":"', body[named : body.index(b'"', named)], b'"']
            if self._routing_bytes:
                start = body.index(b'"input_ids":[')
                end = body.index(b"]", start)
                skipped = _ROWS_FROM.search(body, end)
                rows = body.count(b",", start, end) + self._new - (int(skipped.group(1)) if skipped else 0)
                parts += [b',"routed_experts":"', self._routing(rows), b'"']
            payload = b"".join([*parts, b"}}"])
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload)
        self._transport.writelines([head, payload])

    def _routing(self, rows: int) -> bytes:
        """Base64 of `rows` rows; zeros, as every answer is a prefix of the next."""
        size = rows * self._routing_bytes
        padded = base64.b64encode(bytes(size % 3)) if size % 3 else b""
        need = size // 3 * 4
        if len(self._routes) < need:
            self._routes = b"A" * (2 * need)
        return self._routes[:need] + padded


async def serve_mock(output_ids: list[int], routing_bytes: int, ready: Callable[[int], None]) -> None:
    """Serve on a free port until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: MockEngine(output_ids, routing_bytes), "127.0.0.1", 0)
    ready(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


class _Reply(msgspec.Struct):
    content: str | None


class _Choice(msgspec.Struct):
    message: _Reply


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Answer)


class Conversation:
    """One session as a client sees it: a growing text of messages, sent whole every turn.

    Args:
        port: of the session server.
        session_id: an open session.
        path: where turns go, by default to the session's chat.

    Attributes:
        sent: bytes of the last body.
    """

    def __init__(self, port: int, session_id: str = "", *, path: str = "") -> None:
        self.sent = 0
        self._port = port
        self._path = path or f"/sessions/{session_id}/v1/chat/completions"
        self._messages: list[bytes] = []
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def turn(self, text: str) -> None:
        """Append a user message, ask, and append the reply; a turn waits for the one before."""
        async with self._lock:
            await self._turn(text)

    async def _turn(self, text: str) -> None:
        self._messages.append(_message("user", text))
        body = b'{"model":"policy","max_tokens":4096,"messages":[' + b",".join(self._messages) + b"]}"
        self.sent = len(body)
        answer = _DECODER.decode(await self._post(self._path, body))
        self._messages = [b",".join(self._messages), _message("assistant", answer.choices[0].message.content or "")]

    async def _post(self, path: str, body: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        reader, writer = self._streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.writelines([head.encode(), body])
        await writer.drain()
        header = await reader.readuntil(b"\r\n\r\n")
        found = _LENGTH.search(header)
        assert found is not None
        payload = await reader.readexactly(int(found.group(1)))
        if b" 200 " not in header[:16]:
            raise RuntimeError(payload.decode())
        return payload

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


async def open_session(port: int) -> str:
    """A new session on the server."""
    connection = Conversation(port)
    answer = json.loads(await connection._post("/sessions", b""))
    connection.close()
    return str(answer["session_id"])


def _message(role: str, content: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": content})
