"""Runs a module as a child that cannot outlive its parent: `python -m miles_loop.child FD module [arguments]`.

`FD -- program [arguments]` does the same for a program.

    driver  --- pipe --->  guard (waits for the pipe's end, then kills the group)
       \\--- starts --->  module (leads the group; whatever it starts is in it)

The driver holds the write end of the pipe and never writes. When the driver ends, however it ends, the pipe ends
too, and the guard kills the group: the module, what the module has started, and itself. The guard is a process and
not a thread of the module, so that neither a held interpreter lock nor a crash of the module can stop it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

_MAX_DESCRIPTORS = 4096


def _guard(pipe: int) -> None:
    """Wait for the end of the driver, or of the pipe that it closes when the module has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the module may take its time; the guard stays until it is over
    # What the module is connected to must see the module's end, which an open copy here would hide.
    os.closerange(0, pipe)
    os.closerange(pipe + 1, _MAX_DESCRIPTORS)
    while True:
        try:
            if not os.read(pipe, 1):
                break
        except InterruptedError:
            continue
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Start the guard, then become the module, or the program."""
    pipe, module = int(sys.argv[1]), sys.argv[2]
    if os.getpgrp() != os.getpid():
        raise SystemExit("miles_loop.child must lead its process group")
    if os.fork() == 0:
        try:
            _guard(pipe)
        finally:
            os._exit(0)
    os.close(pipe)
    if module == "--":
        try:
            os.execvp(sys.argv[3], sys.argv[3:])
        except OSError as error:
            raise SystemExit(f"{sys.argv[3]} cannot be started: {error.strerror}") from None
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
