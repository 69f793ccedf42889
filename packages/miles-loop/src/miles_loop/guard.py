"""The guard of a child, as the driver sees it: who guards is noticed when it is gone, and replaced.

    driver  --- life line --->  guard (see `miles_loop.child`)
            <--- watch --------

The guard kills the child's process group when the life line ends, which the driver's end brings about. It holds the
other end of the watch: when that one ends while the child still runs, somebody has killed the guard (a person, or the
system for want of memory), and the child would outlive a driver that dies. A guard that comes later is no child of the
process it guards: it names the group instead of being in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable

_log = logging.getLogger(__name__)
_SHELL = "/bin/sh"
_SUBSTITUTE = 'while read _; do :; done; kill -s KILL -- "-$1"'
_SETTLES_S = 0.5
"""How long the child may take to end after its guard: killed together, either may be seen first."""


class Guard:
    """Life line and watch of one start of a child.

    Args:
        name: of the child, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        theirs, self._life_line = os.pipe()
        self._watch, alive = os.pipe()
        self._theirs = [theirs, alive]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._later: asyncio.TimerHandle | None = None
        self._substitute: subprocess.Popen[bytes] | None = None

    @property
    def passed(self) -> tuple[int, int]:
        """The descriptors that the child inherits, as its command line names them (`argument`)."""
        read_end, alive = self._theirs
        return read_end, alive

    @property
    def argument(self) -> str:
        """The first argument of `miles_loop.child`."""
        return ",".join(map(str, self.passed))

    def let_go(self) -> None:
        """Close the child's ends here: it has them, or was never started."""
        for descriptor in self._theirs:
            os.close(descriptor)
        self._theirs = []

    def watch(self, group: int, runs: Callable[[], bool]) -> None:
        """Look after the guard of a child that was started.

        Args:
            group: the child's process group.
            runs: whether the child is there, and has not been told to end.
        """

        def gone() -> None:
            assert self._loop is not None
            self._stop_watching()
            self._later = self._loop.call_later(_SETTLES_S, settle)

        def settle() -> None:
            if runs():
                self._replace(group)

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._watch, gone)

    def _replace(self, group: int) -> None:
        theirs, life_line = os.pipe()
        try:
            self._substitute = subprocess.Popen(
                [_SHELL, "-c", _SUBSTITUTE, "miles-guard", str(group)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(life_line)
            _log.error(
                "process %s lost its guard and gets no other one (%s): end it yourself if this process dies",
                self._name,
                error,
            )
            return
        finally:
            os.close(theirs)
        os.close(self._life_line)
        self._life_line = life_line
        _log.warning("somebody killed the guard of process %s; it has another one", self._name)

    def close(self) -> None:
        """End the guard and whatever is left of the child's group; the child has ended. Idempotent."""
        if self._later is not None:
            self._later.cancel()
        if self._watch >= 0:
            self._stop_watching()
        if self._substitute is not None:
            # It knows the group by number, which may be another's by now: it must not act on the end of its line.
            self._substitute.send_signal(signal.SIGKILL)
            self._substitute.wait()
            self._substitute = None
        if self._life_line >= 0:
            os.close(self._life_line)
            self._life_line = -1

    def _stop_watching(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._watch)
        os.close(self._watch)
        self._watch = -1
