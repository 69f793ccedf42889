"""Answers the driver's requests over a socket, whatever does the training.

An error of a request is an answer; only a broken connection or `Stop` ends the service. Needs no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

from miles_contracts import MilesError, WeightUpdateError, wire
from miles_loop import trainer_link as link
from miles_loop.tcp_link import connect

_HEADER_BYTES = 32


class Service(Protocol):
    """What is behind the connection, once it was told to start."""

    @property
    def version(self) -> int:
        """Number of optimiser updates."""

    def answer(self, request: link.Request) -> link.Reply:
        """Carry out one request."""

    def close(self) -> None:
        """The conversation is over."""


class Connection:
    """Frames over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def receive(self) -> link.Request | None:
        """The next request; None when the driver has closed the connection."""
        header = self._read(_HEADER_BYTES)
        if header is None:
            return None
        buffer = bytearray(wire.frame_length(header))
        buffer[:_HEADER_BYTES] = header
        view = memoryview(buffer)[_HEADER_BYTES:]
        while view:
            count = self._socket.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return wire.decode(buffer, link.Request)  # type: ignore[arg-type]

    def send(self, reply: link.Reply) -> None:
        """Send one reply."""
        self._socket.sendall(wire.encode(reply))

    def _read(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                return None
            data += part
        return data


def serve(connection: Connection, start: Callable[[link.Start], Service]) -> None:
    """Answer until the driver says stop or is gone.

    Args:
        connection: to the driver.
        start: makes the service of a `Start` request.
    """
    service: Service | None = None
    try:
        while (request := connection.receive()) is not None and not isinstance(request, link.Stop):
            try:
                if isinstance(request, link.Start):
                    service = start(request)
                    reply: link.Reply = link.Started(version=service.version)
                elif service is None:
                    raise MilesError("the first request must be start")
                else:
                    reply = service.answer(request)
            except Exception as error:  # noqa: BLE001 - request boundary: every error is an answer
                traceback.print_exc()
                message = error.reason if isinstance(error, WeightUpdateError) else str(error)
                reply = link.Failed(kind=type(error).__name__, message=message)
            connection.send(reply)
    finally:
        try:
            # The driver says stop and sends SIGTERM right after: closing must not be cut short by the second.
            if threading.current_thread() is threading.main_thread():  # tests serve in other threads
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            if service is not None:
                service.close()


def _end_in_order(*_: object) -> NoReturn:
    """SIGTERM: unwind once; another one must not interrupt the unwinding."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def serve_process(where: str, start: Callable[[link.Start], Service]) -> NoReturn:
    """Serve the driver, then end the process; SIGTERM ends it in order too.

    Args:
        where: number of a connected socket that was inherited, or `host:port` of the driver (see `tcp_link`).
        start: makes the service of a `Start` request.
    """
    signal.signal(signal.SIGTERM, _end_in_order)
    status = 1
    try:
        with socket.socket(fileno=int(where)) if where.isdigit() else connect(where) as sock:
            serve(Connection(sock), start)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:  # noqa: BLE001 - process main: the log is the only reader left
        traceback.print_exc()
    finally:
        # Everything is closed; what libraries do at exit takes seconds and nobody needs it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
