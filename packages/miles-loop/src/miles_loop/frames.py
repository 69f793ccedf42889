"""Messages over a stream socket, both ways and in order: one wire frame each, any number of them on their way.

A frame is received straight into the one buffer that its arrays are views of afterwards; nothing copies it again.
Reading pauses while too much of what has arrived is not decoded, so a peer cannot fill the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from miles_contracts import WireError, wire

M = TypeVar("M")
_OFF_LOOP_BYTES = 2**20
"""Frames larger than this (about a millisecond of checksums) are decoded in a thread."""
_MAX_INBOX_FRAMES = 256
_MAX_INBOX_BYTES = 256 * 2**20


class FrameAssembler:
    """Cuts a stream of bytes into frames. Owns no socket.

    The owner reads at most `len(room)` bytes into `room`, says how many came, and gets the frame once it is whole.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._frame, self._have, self._sized = bytearray(wire.HEADER_BYTES), 0, False

    @property
    def room(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return memoryview(self._frame)[self._have :]

    def filled(self, count: int) -> bytearray | None:
        """`count` bytes of `room` are filled; returns the frame when that was its end.

        Raises:
            WireError: this is no frame.
        """
        self._have += count
        if self._have < len(self._frame):
            return None
        if not self._sized:
            whole = bytearray(wire.frame_length(memoryview(self._frame)))
            whole[: wire.HEADER_BYTES] = self._frame
            self._frame, self._sized = whole, True
            if self._have < len(whole):
                return None
        frame = self._frame
        self._begin()
        return frame


class FrameLink(asyncio.BufferedProtocol, Generic[M]):
    """One end of the connection; made by `open`.

    Args:
        kind: type of the messages that arrive (a union of tagged structures).
        deliver: takes each of them, in order, on the event loop.

    Attributes:
        ended: has a result, why in words, once the connection is over and everything that arrived is delivered.
        received: messages delivered so far.
    """

    def __init__(self, kind: Any, deliver: Callable[[M], None]) -> None:
        self._kind = kind
        self._deliver = deliver
        self._assembler = FrameAssembler()
        self._transport: asyncio.Transport | None = None
        self._inbox: deque[bytearray] = deque()
        self._inbox_bytes = 0
        self._paused = False
        self._outbox: deque[list[Any]] = deque()
        self._arrived, self._queued, self._writable = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._over = ""
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.received = 0

    @classmethod
    async def open(cls, sock: socket.socket, kind: Any, deliver: Callable[[M], None]) -> FrameLink[M]:
        """Over a connected socket, which belongs to the link from now on."""
        made = cls(kind, deliver)
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: made, sock=sock)
        made._tasks = (
            asyncio.create_task(made._read(), name="frames-in"),
            asyncio.create_task(made._write(), name="frames-out"),
        )
        return made

    def send(self, message: Any) -> None:
        """Queue one message; nothing happens when the connection is over.

        Raises:
            WireError: a value that the format does not know.
        """
        self.send_parts(wire.encode_parts(message))

    def send_parts(self, parts: list[Any]) -> None:
        """Queue a message that is encoded already (see `wire.encode_parts`)."""
        if not self._over:
            self._outbox.append(parts)
            self._queued.set()

    async def close(self) -> None:
        """End the connection at once; what is queued is dropped."""
        self._end("it was closed here")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- asyncio's side -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has the socket."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The rest of the current frame."""
        return self._assembler.room

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes are there."""
        try:
            frame = self._assembler.filled(nbytes)
        except WireError as error:
            self._end(f"it sent what is no message: {error}")
            return
        if frame is None:
            return
        self._inbox.append(frame)
        self._inbox_bytes += len(frame)
        self._arrived.set()
        if self._full and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The peer says no more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._end(f"the connection broke: {exc}" if exc is not None else "it closed the connection")

    def pause_writing(self) -> None:
        """The system takes no more for now."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It does again."""
        self._writable.set()

    # -- ours -----------------------------------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return len(self._inbox) >= _MAX_INBOX_FRAMES or self._inbox_bytes >= _MAX_INBOX_BYTES

    def _end(self, why: str) -> None:
        self._over = self._over or why
        self._arrived.set()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()

    async def _read(self) -> None:
        why = ""
        try:
            while self._inbox or not self._over:
                if not self._inbox:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                frame = self._inbox.popleft()
                self._inbox_bytes -= len(frame)
                if self._paused and not self._full and self._transport is not None and not self._over:
                    self._paused = False
                    self._transport.resume_reading()
                self._deliver(await self._decoded(frame))
                self.received += 1
        except WireError as error:
            why = f"it sent a message that cannot be read: {error}"
        finally:
            self._end(why or "its messages could not be handled")
            if not self.ended.done():
                self.ended.set_result(self._over)

    async def _decoded(self, frame: bytearray) -> M:
        decode = cast(Callable[..., M], wire.decode)
        if len(frame) > _OFF_LOOP_BYTES:
            return await asyncio.to_thread(decode, frame, self._kind)
        return decode(frame, self._kind)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):
            while not self._over:
                if not self._outbox:
                    self._queued.clear()
                    await self._queued.wait()
                    continue
                await self._writable.wait()
                if self._transport is not None and not self._over:
                    self._transport.writelines(self._outbox[0])
                self._outbox.popleft()
