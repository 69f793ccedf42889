"""Runs a module as a child that cannot outlive its parent: `python -m miles_loop.child FD module [arguments]`.

The parent holds the write end of the pipe whose read end is FD and never writes. When the parent ends, however it
ends, the pipe closes and the child kills its own process group. Linux tells us by a signal as well, which also
works while some C code holds the interpreter lock.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _die_with_parent(fd: int) -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(fd,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was armed
        _kill_group()


def _watch(fd: int) -> None:
    while True:
        try:
            if not os.read(fd, 1):
                break
        except InterruptedError:
            continue
    _kill_group()


def _kill_group() -> None:
    """The child leads its own session, so the group holds it and whatever it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Arm the watch, then become the module."""
    fd, module = int(sys.argv[1]), sys.argv[2]
    _die_with_parent(fd)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
