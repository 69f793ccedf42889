"""Errors of rendering: each says which message, which token and what to do."""

from __future__ import annotations

from miles_contracts import MilesError


class RenderError(MilesError, ValueError):
    """A conversation cannot be rendered for this model family (a role, field or tool it has no form for)."""


class RenderRefusedError(RenderError):
    """The appended part cannot be tokenised so that it equals an in-context rendering of the whole.

    Attributes:
        message_index: index, in history + appended, of the message at which the renderings part ways.
        position: index of the first differing token, counted from the start of the whole rendering.
        token: text of that token as the in-context rendering has it (empty when it ends there).
        reason: what differs.
    """

    def __init__(self, reason: str, *, message_index: int, position: int, token: str, remedy: str) -> None:
        super().__init__(f"message {message_index}, token {position} ({token!r}): {reason}; {remedy}")
        self.reason = reason
        self.message_index = message_index
        self.position = position
        self.token = token


class CallOpeningError(RenderError):
    """The opening of a forced call cannot be written exactly in this family."""
