"""Answers the driver's requests over a socket, whatever does the training.

An error of a request is an answer; only a broken connection or `Stop` ends the service. Needs no torch.
"""

from __future__ import annotations

import logging
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
from miles_loop.frames import FrameAssembler
from miles_loop.tcp_link import linked

_log = logging.getLogger(__name__)


class Service(Protocol):
    """What is behind the connection, once it was told to start."""

    @property
    def version(self) -> int:
        """Number of optimiser updates."""

    def answer(self, request: link.Request) -> link.Reply:
        """Carry out one request."""

    def close(self) -> None:
        """The conversation is over."""


class Membership(Protocol):
    """What a process has to do with a trainer group before it is told to start."""

    def before(self, request: link.Request) -> link.Reply:
        """Answer a request that comes first."""

    def next_driver(self) -> socket.socket | None:
        """Who tells this process what to do once the driver has hung up before `Start`."""


class Connection:
    """Frames over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def receive(self) -> link.Request | None:
        """The next request; None when the driver has closed the connection."""
        frame = self.receive_frame()
        return None if frame is None else wire.decode(frame, link.Request)  # type: ignore[arg-type]

    def receive_frame(self) -> bytearray | None:
        """The next frame; None when the other side has closed the connection."""
        assembler, frame = FrameAssembler(), None
        while frame is None:
            count = self._socket.recv_into(assembler.room)
            if not count:
                return None
            frame = assembler.filled(count)
        return frame

    def send(self, message: link.Reply | link.Request) -> None:
        """Send one frame."""
        self._socket.sendall(wire.encode(message))


def failed(error: Exception) -> link.Failed:
    """An error as an answer."""
    if isinstance(error, WeightUpdateError):
        return link.Failed(kind=type(error).__name__, message=error.reason, tensor=error.tensor)
    return link.Failed(kind=type(error).__name__, message=str(error))


def serve(connection: Connection, start: Callable[[link.Start], Service], membership: Membership | None = None) -> bool:
    """Answer until the driver says stop or is gone; returns whether it said so.

    Args:
        connection: to the driver.
        start: makes the service of a `Start` request.
        membership: answers what comes before it.
    """
    service: Service | None = None
    try:
        while (request := connection.receive()) is not None and not isinstance(request, link.Stop):
            try:
                if isinstance(request, link.Start):
                    service = start(request)
                    reply: link.Reply = link.Started(version=service.version)
                elif service is None:
                    if membership is None:
                        raise MilesError("the first request must be start")
                    reply = membership.before(request)
                else:
                    reply = service.answer(request)
            except Exception as error:  # noqa: BLE001 - request boundary: every error is an answer
                traceback.print_exc()
                reply = failed(error)
            connection.send(reply)
        return request is not None
    finally:
        try:
            # The driver says stop and sends SIGTERM right after: closing must not be cut short by the second.
            if threading.current_thread() is threading.main_thread():  # tests serve in other threads
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            if service is not None:
                service.close()


def _serve_first_rank(sock: socket.socket, start: Callable[[link.Start], Service]) -> None:
    """Serve rank 0 of the trainer group; when that is lost, wait to be ended too: its end is the one to be reported."""
    try:
        with sock:
            ended = serve(Connection(sock), start)
    except ConnectionError as error:
        _log.warning("rank 0 of the trainer group is lost: %s", error)
        ended = False
    if not ended:
        signal.pause()


def _end_in_order(*_: object) -> NoReturn:
    """SIGTERM: unwind once; another one must not interrupt the unwinding."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def serve_process(where: str, start: Callable[[link.Start], Service], membership: Membership | None = None) -> NoReturn:
    """Serve the driver, then end the process; SIGTERM ends it in order too.

    Args:
        where: how the driver is reached (see `tcp_link.linked`).
        start: makes the service of a `Start` request.
        membership: of a process that may be a rank of a trainer group.
    """
    signal.signal(signal.SIGTERM, _end_in_order)
    status = 1
    try:
        with linked(where) as sock:
            serve(Connection(sock), start, membership)
        if membership is not None and (first := membership.next_driver()) is not None:
            _serve_first_rank(first, start)
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
