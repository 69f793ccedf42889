"""Every refusal of the session server is one of these, and knows its HTTP status and OpenAI error code.

409 and 5xx are kept for what a client may simply send again (the official client retries them by itself);
a request that can never succeed is a 400.
"""

from __future__ import annotations

from typing import Any, ClassVar

from miles_contracts import MilesError


class SessionError(MilesError):
    """Base: a request was refused and the session is as it was before.

    Attributes:
        status: HTTP status of the answer.
        code: stable machine-readable name.
        kind: OpenAI's error `type`.
        param: the request field at fault, None when there is none.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def to_dict(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class BadRequestError(SessionError):
    """The request is malformed or asks for something that cannot be done."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class HistoryDivergedError(BadRequestError):
    """A linear session got a history that is not its own.

    Attributes:
        message_index: position of the first message that differs, in the request; -1 when the tools differ.
        field: the first field of it that differs.
    """

    code = "history_diverged"

    def __init__(self, message: str, *, message_index: int, field: str) -> None:
        param = field if message_index < 0 else f"messages[{message_index}].{field}"
        super().__init__(message, param=param)
        self.message_index = message_index
        self.field = field


class TruncatedTurnError(BadRequestError):
    """The request continues a turn that its length limit cut."""

    code = "turn_truncated"


class ContextLengthError(BadRequestError):
    """The prompt leaves no room for a new token."""

    code = "context_length_exceeded"


class RenderRefusedError(BadRequestError):
    """The renderer cannot append these messages exactly."""

    code = "render_refused"


class NodeLimitError(BadRequestError):
    """The session holds as many turns as it may."""

    code = "session_node_limit"


class UnauthorizedError(SessionError):
    """The bearer token is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class SessionNotFoundError(SessionError):
    """No such session: never made, deleted, or idle for longer than its time to live."""

    status = 404
    code = "session_not_found"
    kind = "invalid_request_error"


class SessionBusyError(SessionError):
    """Another request on this linear session is being served."""

    status = 409
    code = "session_busy"
    kind = "conflict_error"


class BodyTooLargeError(SessionError):
    """The request body is larger than the server's limit."""

    status = 413
    code = "body_too_large"
    kind = "invalid_request_error"


class SessionLimitError(SessionError):
    """The server holds as many sessions as it may."""

    status = 429
    code = "session_limit"
    kind = "rate_limit_error"


class MatcherError(SessionError):
    """A user's message matcher raised or did not return a bool."""

    code = "matcher_failed"


class UpstreamError(SessionError):
    """The engine failed or answered something that is not an answer."""

    status = 502
    code = "engine_error"


class UpstreamRefusedError(UpstreamError):
    """The engine refused the request (a prompt longer than its context, say): sending it again does not help."""

    status = 400
    code = "engine_refused"
    kind = "invalid_request_error"


class UpstreamUnavailableError(UpstreamError):
    """The engine could not be reached, died, or aborted the request."""

    status = 503
    code = "engine_unavailable"


class UpstreamTimeoutError(UpstreamError):
    """The engine did not answer in time."""

    status = 504
    code = "engine_timeout"
