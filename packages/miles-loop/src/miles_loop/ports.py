"""Ports for servers of a run: chosen here, and kept from being chosen by anybody else until the run ends.

A server learns its port as a number on its command line, and binds it seconds later. A port that was only looked up
and let go may be somebody else's by then. So this process stays bound to it, without listening: the system neither
gives such a port to whoever asks for a free one nor to an outgoing connection, yet the server can bind it, because
both set SO_REUSEADDR and this end does not listen. When the server has died, connections are refused, and started
again it finds its address as it was. Only a program that asks for exactly this number, in the moments when no server
of ours listens there, can still come between: that is what `taken` tells.
"""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any

from miles_contracts import InvalidFieldError


class Port:
    """One port of this machine that is kept.

    Args:
        host: name or address to listen on.
        number: the port that is wanted, 0 for any free one.

    Attributes:
        number: the port.
        wanted: whether it was asked for by its number.

    Raises:
        OSError, OverflowError: it cannot be had.
    """

    def __init__(self, host: str, number: int = 0) -> None:
        found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        self._family: int = found[0]
        self._address: tuple[Any, ...] = found[4]
        self._host = host
        self.wanted = number != 0
        self._kept: socket.socket | None = self._bound(number)
        self.number: int = self._kept.getsockname()[1]
        if sys.platform != "linux":  # elsewhere the server could not bind what is bound here
            self.close()

    @property
    def url(self) -> str:
        """Where a server on it is reached."""
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{shown}:{self.number}"

    def taken(self) -> bool:
        """Whether somebody listens there. Ask while no server of ours does."""
        try:
            self._bound(self.number).close()
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False

    def another(self) -> Port:
        """A free port of the same host, instead of this one."""
        made = Port(self._host)
        self.close()
        return made

    def close(self) -> None:
        """Let go of it; idempotent."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _bound(self, number: int) -> socket.socket:
        made = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((self._address[0], number, *self._address[2:]))
        except BaseException:  # nothing stays open, whatever ended this
            made.close()
            raise
        return made


def choose_ports(host: str, first: int, count: int) -> list[Port]:
    """`count` ports to listen on: `first`, `first` + 1 ... or free ones when `first` is 0.

    Raises:
        InvalidFieldError: a port that was asked for is taken, or the host is not this machine's.
    """
    made: list[Port] = []
    for index in range(count):
        number = first and first + index
        try:
            made.append(Port(host, number))
        except (OSError, OverflowError) as error:
            for port in made:
                port.close()
            remedy = "cannot be listened on; set engine.port to a free port, or to 0"
            field = "engine.port" if number else "engine.host"
            raise InvalidFieldError(field, f"{host}:{number}", f"{remedy} ({error})") from None
    return made
