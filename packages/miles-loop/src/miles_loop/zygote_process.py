"""Imports for others, then forks them: `python -m miles_loop.zygote_process FD [module ...]` (`miles_loop.zygote`)."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from miles_loop import child
from miles_loop.zygote import Reply, Request

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""
_MAX_REQUEST, _MAX_DESCRIPTORS = 1 << 20, 16


def _fork(request: Request, received: list[int], connection: socket.socket) -> int:
    """Fork the child by way of a process that ends at once; its process id.

    The child begins when it is the driver's: until then its parent's id would be of a process that nobody knows.
    """
    read_end, write_end = os.pipe()
    go_read, go_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
            if pid == 0:
                for descriptor in (read_end, write_end, go_write):
                    os.close(descriptor)
                connection.close()
                if not os.read(go_read, 1):
                    os._exit(1)  # the zygote is gone
                os.close(go_read)
                _become(request, received)
            os.write(write_end, pid.to_bytes(4, "little"))
        finally:
            os._exit(0)  # whatever happens, there is one zygote
    os.close(write_end)
    os.close(go_read)
    told = os.read(read_end, 4)
    os.close(read_end)
    os.waitpid(middle, 0)  # from now on the child is the driver's
    with contextlib.suppress(BrokenPipeError):
        os.write(go_write, b"g")
    os.close(go_write)
    if not told:
        raise OSError("the second fork failed")
    return int.from_bytes(told, "little")


def _become(request: Request, received: list[int]) -> NoReturn:
    """In the child: be what a new interpreter with these arguments would be."""
    status = 1
    try:
        os.setsid()
        numbers = [1, *request.descriptors]
        # Out of the way first: they may have come under each other's final numbers.
        away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in received]
        for descriptor in received:
            os.close(descriptor)
        for descriptor, number in zip(away, numbers, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.dup2(1, 2)
        sys.argv = [child.__file__, *request.arguments]
        # Before the environment changes: the title is written where that lies.
        setproctitle(" ".join([sys.executable, "-m", child.__name__, *request.arguments]))
        os.environ.clear()
        os.environ.update(request.environment)
        gc.enable()
        child.main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as error:  # noqa: BLE001 - process main: told in its log
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Import, say so, then fork what is asked for until the driver hangs up."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Nothing that is imported is ever garbage: looking for it takes a fifth of the time.
    gc.disable()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child must not touch, and so copy, what it shares
    if len(os.listdir("/proc/self/task")) > 1:
        return  # a fork would lack these threads
    connection.send(b"r")
    while True:
        data, received, _, _ = socket.recv_fds(connection, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not data:
            return
        try:
            reply = Reply(pid=_fork(msgspec.msgpack.decode(data, type=Request), received, connection))
        except OSError as error:
            reply = Reply(error=str(error))
        for descriptor in received:
            os.close(descriptor)
        connection.send(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
