"""Peers anywhere: a thread of the target takes writes from a socket straight into the region.

A connection begins with the region's secret, so that a stray or stale writer cannot touch memory. Each write is

    runs u64 | run length u64 | offsets i64[runs] | data

and a batch ends with runs = 0, which the target answers with one byte when every byte of the batch is in place.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Sequence

import numpy as np

from miles_contracts import InvalidFieldError, WeightUpdateError
from miles_sync.peer.memory import Write
from miles_sync.runs import Bytes, put_runs

_HEADER = struct.Struct("<QQ")
_DIRECT_BYTES = 64 * 1024
"""Runs from this length on are received straight into place; shorter ones through a buffer."""
_DONE, _SECRET_BYTES = b"\x01", 16
_PREFIX = "tcp:"


class TcpBackend:
    """Regions behind `host`, an address of this machine that the writers can reach.

    Raises:
        InvalidFieldError: a timeout that is not positive.
    """

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 60.0) -> None:
        if not timeout_s > 0:
            raise InvalidFieldError("timeout_s", timeout_s, "give a positive number of seconds")
        self._host, self._timeout_s = host, timeout_s

    def expose(self, num_bytes: int) -> TcpMemory:
        """A region with a listening socket of its own."""
        return TcpMemory(self._host, num_bytes)

    def writer(self) -> TcpWriter:
        """Connects to regions at their first use."""
        return TcpWriter(self._timeout_s)


class TcpMemory:
    """A region of this process."""

    def __init__(self, host: str, num_bytes: int) -> None:
        self.data: Bytes = np.empty(num_bytes, np.uint8)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server = socket.create_server((host, 0))
        self._connections: set[socket.socket] = set()
        self.handle = f"{_PREFIX}{host}:{self._server.getsockname()[1]}:{self._secret.hex()}"
        threading.Thread(target=self._accept, name="peer-memory", daemon=True).start()

    def close(self) -> None:
        """Stop listening and cut the writers off."""
        # Closing a socket does not wake a thread that waits on it; shutting it down does.
        for sock in [self._server, *self._connections]:
            _cut(sock)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="peer-write", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not secrets.compare_digest(_receive(connection, _SECRET_BYTES), self._secret):
                    return
                while self._take_batch(connection):
                    connection.sendall(_DONE)
        except OSError:
            # The writer is gone. Whether its bytes count is for the digests to say.
            return
        finally:
            self._connections.discard(connection)

    def _take_batch(self, connection: socket.socket) -> bool:
        while True:
            count, length = _HEADER.unpack(_receive(connection, _HEADER.size))
            if count == 0:
                return True
            size = len(self.data)
            if length == 0 or count > size or count * length > size:
                return False
            offsets = np.frombuffer(_receive(connection, 8 * count), np.int64)
            if int(offsets.min()) < 0 or int(offsets.max()) + length > size:
                return False
            if length >= _DIRECT_BYTES:
                for offset in offsets.tolist():
                    _receive_into(connection, self.data[offset : offset + length])
            else:
                packed = np.empty(count * length, np.uint8)
                _receive_into(connection, packed)
                put_runs(self.data, offsets, length, packed)


class TcpWriter:
    """Writes over one connection per region."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[str, socket.socket] = {}

    def write(self, handle: str, writes: Sequence[Write]) -> None:
        """Send a batch and wait for its answer.

        Raises:
            WeightUpdateError: the peer is gone, refused a write, or was too slow.
        """
        try:
            connection = self._connection(handle)
            for write in writes:
                header = _HEADER.pack(len(write.offsets), write.length)
                connection.sendall(header + write.offsets.astype("<i8").tobytes())
                connection.sendall(write.data.data)
            connection.sendall(_HEADER.pack(0, 0))
            _receive(connection, 1)
        except TimeoutError as error:
            self._drop(handle)
            raise WeightUpdateError(f"waited {self._timeout_s:g} s for peer memory {_shown(handle)}") from error
        except OSError as error:
            self._drop(handle)
            raise WeightUpdateError(f"peer memory {_shown(handle)} is gone or refused a write: {error}") from error

    def keep(self, handles: Collection[str]) -> None:
        """Close the connections to all others."""
        for handle in self._connections.keys() - set(handles):
            self._drop(handle)

    def close(self) -> None:
        """Close all connections."""
        self.keep(())

    def _connection(self, handle: str) -> socket.socket:
        if handle not in self._connections:
            host, port, secret = handle.removeprefix(_PREFIX).rsplit(":", 2)
            connection = socket.create_connection((host, int(port)), timeout=self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(secret))
            self._connections[handle] = connection
        return self._connections[handle]

    def _drop(self, handle: str) -> None:
        connection = self._connections.pop(handle, None)
        if connection is not None:
            connection.close()


def _shown(handle: str) -> str:
    """The handle without its secret."""
    return handle.rsplit(":", 1)[0]


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _receive_view(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, target: Bytes) -> None:
    _receive_view(connection, target.data)


def _receive_view(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("the other side closed the connection")
        view = view[got:]
