"""Why a run ended, by name. Every error of a run says what to do next."""

from __future__ import annotations

from pathlib import Path

from miles_contracts import MilesError


class RunError(MilesError):
    """A run ended before its last step. `reason` is a short stable name that scripts may test.

    Attributes:
        reason: for example `process_died`, `disk_full`, `non_finite`, `rollout_failed`.
        resumable: True when `train --resume` can continue the run once the cause is gone.
    """

    def __init__(self, reason: str, message: str, *, resumable: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.resumable = resumable


class ProcessDiedError(RunError):
    """A child process ended by itself. The message shows the end of its log."""

    def __init__(self, name: str, how: str, log: Path, tail: str, advice: str = "") -> None:
        shown = f"\n  ... end of {log}:\n" + "\n".join(f"  | {line}" for line in tail.splitlines()) if tail else ""
        super().__init__("process_died", f"process {name} {how}{shown}" + (f"\n{advice}" if advice else ""))
        self.name = name
        self.how = how
        self._log, self._tail = log, tail

    def advised(self, advice: str) -> ProcessDiedError:
        """The same with a line that says what to do."""
        return ProcessDiedError(self.name, self.how, self._log, self._tail, advice)


class DiskFullError(RunError):
    """The run folder's disk has no room. What was complete before stays complete."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            "disk_full", f"no space left on the disk of {path}; free some, then continue the run with train --resume"
        )
        self.path = path


class TrainerFailedError(RunError):
    """The trainer process reported an error and did not change the weights."""


class InterruptedRunError(RunError):
    """Somebody asked the run to stop (Ctrl-C or SIGTERM)."""

    def __init__(self, how: str) -> None:
        super().__init__("interrupted", f"stopped by {how}")
