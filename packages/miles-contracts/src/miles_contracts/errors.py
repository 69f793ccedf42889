"""Every error names what was wrong, the value seen and the remedy."""

from __future__ import annotations

_SHOWN = 400
"""Longest value a message repeats, in characters: most paths are shown whole."""


def _shortened(text: str) -> str:
    """The text with its middle left out when it is long: a path tells most at its end, a list at its start."""
    if len(text) <= _SHOWN:
        return text
    half = (_SHOWN - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


class MilesError(Exception):
    """Base of all errors that Miles raises on purpose."""


class InvalidFieldError(MilesError, ValueError):
    """A value breaks an invariant of a contract.

    Attributes:
        field: dotted name of the offending field.
        value: the value as seen, shortened for display.
        remedy: what to do about it.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}: got {_shortened(repr(value))}; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class WireError(MilesError, ValueError):
    """Bytes are not a message of the wire format (truncated, corrupted, foreign or too new)."""


class ContractMismatchError(MilesError):
    """Two ends of a contract disagree; the message lists every difference."""


class EngineError(MilesError):
    """An engine refused, failed or answered something that is not an answer.

    Attributes:
        engine: URL or name of the engine.
        status: HTTP status, or None when there was no answer.
        reason: what the engine said or what was wrong with its answer.
    """

    def __init__(self, engine: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"engine {engine}: {reason}" + (f" (HTTP {status})" if status is not None else ""))
        self.engine = engine
        self.status = status
        self.reason = reason


class EngineUnavailableError(EngineError):
    """The engine could not be reached or died before it answered; the request may be sent elsewhere."""


class DeadlineExceededError(MilesError, TimeoutError):
    """A wait on a peer passed its deadline."""

    def __init__(self, waited_for: str, seconds: float, remedy: str) -> None:
        super().__init__(f"waited {seconds:g} s for {waited_for}; {remedy}")
        self.waited_for = waited_for
        self.seconds = seconds


class WeightUpdateError(MilesError):
    """A weight update was rolled back; the old version goes on serving.

    Attributes:
        engine: the engine that failed, or None when the sender did.
        tensor: canonical name of the offending tensor, or None.
        reason: what happened.
    """

    def __init__(self, reason: str, *, engine: str | None = None, tensor: str | None = None) -> None:
        where = "".join([f" on {engine}" if engine else "", f", tensor {tensor}" if tensor else ""])
        super().__init__(f"weight update failed{where}: {reason}; the previous version keeps serving")
        self.engine = engine
        self.tensor = tensor
        self.reason = reason
