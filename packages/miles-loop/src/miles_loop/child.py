"""Runs a module as a child that cannot outlive its parent: `python -m miles_loop.child FD[,FD] module [arguments]`.

`FD -- program [arguments]` does the same for a program. The first descriptor is the end of the pipe below; the second,
if there is one, is held by the guard alone, so that the driver notices when the guard is gone (`miles_loop.guard`).

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
_KEPT = 3
"""Number under which the guard holds its end of the watch."""
_SHELL = "/bin/sh"
_GUARD = "while read _; do :; done; kill -KILL 0"
"""What the guard runs: wait for the end of its standard input, then kill its process group, itself included. An
interpreter that waits beside every process of a run would take ten times a shell's memory."""


def _guard(pipe: int, watch: int | None) -> None:
    """Become the guard: wait for the end of the driver, or of the pipe that it closes when the module has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the module may take its time; the guard stays until it is over
    # What the module is connected to must see the module's end, which an open copy here would hide.
    os.dup2(pipe, 0)
    if watch is not None:
        watch = os.dup(watch) if watch == _KEPT else watch
        os.dup2(watch, _KEPT)
    os.closerange(_KEPT + (watch is not None), _MAX_DESCRIPTORS)
    os.set_inheritable(1, False)
    os.set_inheritable(2, False)
    try:
        os.execv(_SHELL, ["miles-guard", "-c", _GUARD])
    except OSError as error:
        os.write(2, f"{_SHELL}, which guards this process, cannot be started: {error.strerror}\n".encode())
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Start the guard, then become the module, or the program."""
    descriptors = [int(number) for number in sys.argv[1].split(",")]
    pipe, watch = descriptors[0], descriptors[1] if len(descriptors) > 1 else None
    module = sys.argv[2]
    if os.getpgrp() != os.getpid():
        raise SystemExit("miles_loop.child must lead its process group")
    if os.fork() == 0:
        _guard(pipe, watch)
    for descriptor in descriptors:
        os.close(descriptor)
    if module == "--":
        try:
            os.execvp(sys.argv[3], sys.argv[3:])
        except OSError as error:
            raise SystemExit(f"{sys.argv[3]} cannot be started: {error.strerror}") from None
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
