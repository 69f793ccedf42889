"""A process's connection to the driver over a network: the driver listens, and only who knows its secret gets in.

    trainer rank, or rollout worker              driver
            <---- nonce D (32 bytes) ------------
            ----- nonce T, HMAC("trainer", D, T) ->
            <---- HMAC("driver", D, T) ----------

Both sides prove the secret (HMAC-SHA256) before either reads a frame, and neither sends it. Frames themselves are
neither encrypted nor signed: use a network that outsiders cannot write to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket

from miles_loop.errors import RunError

_log = logging.getLogger(__name__)
SECRET_VARIABLE = "MILES_LINK_SECRET"
"""Environment variable that gives the process the secret."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_S = 10.0


class Listener:
    """Waits for one process. `address` (`host:port`) and `secret` are what it has to be told.

    Args:
        host: address of this machine to listen on; a free port is taken.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), family=_family(host))
        self._server.setblocking(False)
        self._greeting: set[asyncio.Task[None]] = set()
        self.secret = secrets.token_hex(32)
        self.address = join_address(host, self._server.getsockname()[1])

    async def accept(self) -> socket.socket:
        """The first connection that proves the secret; others are closed. Nobody gets in after it."""
        loop = asyncio.get_running_loop()
        proven: asyncio.Future[socket.socket] = loop.create_future()
        listening = asyncio.create_task(self._listen(proven))
        try:
            return await proven
        finally:
            for task in (listening, *self._greeting):
                task.cancel()
            await asyncio.gather(listening, *self._greeting, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    async def _listen(self, proven: asyncio.Future[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, peer = await loop.sock_accept(self._server)
            # Each in a task of its own: a stranger who says nothing keeps nobody waiting.
            task = asyncio.create_task(self._greet(sock, peer, proven))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, sock: socket.socket, peer: object, proven: asyncio.Future[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                ours = secrets.token_bytes(_NONCE_BYTES)
                await loop.sock_sendall(sock, ours)
                answer = await _receive(sock, _NONCE_BYTES + _PROOF_BYTES)
                theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
                if not hmac.compare_digest(proof, _proof(self.secret, b"trainer", ours, theirs)):
                    raise ConnectionError("it does not know the secret")
                await loop.sock_sendall(sock, _proof(self.secret, b"driver", ours, theirs))
            if proven.done():
                raise ConnectionError("the trainer is connected already")
        except (OSError, TimeoutError) as error:
            _log.warning("a connection from %s is refused: %s", peer, error or "it said nothing")
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            _tune(sock)
            proven.set_result(sock)


def connect(address: str, secret: str | None = None) -> socket.socket:
    """The trainer's end: connect to `host:port` and prove the secret, by default that of MILES_LINK_SECRET.

    Raises:
        RunError: no secret, nobody there, or somebody who does not know the secret.
    """
    secret = secret or os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise RunError("trainer_link", f"{SECRET_VARIABLE} is not set: the driver gives it to the processes it starts")
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=_HANDSHAKE_S)
    except (OSError, ValueError) as error:
        raise RunError("trainer_link", f"the driver does not answer at {address}: {error}") from error
    try:
        theirs = _read(sock, _NONCE_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(ours + _proof(secret, b"trainer", theirs, ours))
        if not hmac.compare_digest(_read(sock, _PROOF_BYTES), _proof(secret, b"driver", theirs, ours)):
            raise ConnectionError("it does not know the secret")
    except OSError as error:
        sock.close()
        raise RunError("trainer_link", f"{address} is not this run's driver: {error}") from error
    sock.settimeout(None)
    _tune(sock)
    return sock


def linked(where: str) -> socket.socket:
    """A process's end of its connection to the driver.

    Args:
        where: number of a connected socket that was inherited, or `host:port` of the driver (see `connect`).
    """
    return socket.socket(fileno=int(where)) if where.isdigit() else connect(where)


def join_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _tune(sock: socket.socket) -> None:
    """Requests are small and answered one by one; a machine that vanished must be noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        with contextlib.suppress(AttributeError):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(secret: str, who: bytes, driver: bytes, trainer: bytes) -> bytes:
    return hmac.digest(secret.encode(), who + driver + trainer, "sha256")


async def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return data


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return data
