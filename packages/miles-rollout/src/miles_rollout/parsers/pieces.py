"""Turns that are a sequence of messages or blocks, each with a header that says what it is (gpt-oss, Inkling)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, Self

from miles_contracts import ToolCall
from miles_rollout.parsers.message import CallId, ParsedMessage, Progress, Tools, text_before


class Kind(Enum):
    """What a piece is to the client."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a turn.

    Attributes:
        kind: what it is.
        text: reasoning or content; empty for a call.
        call: of a call, makes it of its identifier, or says what is wrong with it.
    """

    kind: Kind
    text: str = ""
    call: Callable[[str], ToolCall | str] = lambda _: "not a call"


@dataclass(frozen=True)
class PiecedSyntax:
    """Walks over the pieces of a turn; families say how a piece is found and what it is.

    Text outside every piece is content. The reasoning of all pieces is one, joined by line ends.

    Attributes:
        pattern: matches a piece, also one that the end of the text cuts.
        ends: control tokens that end a piece.
        calls: false to leave calls in the content, as they were written.
    """

    pattern: ClassVar[re.Pattern[str]]
    ends: ClassVar[Sequence[str]]
    calls: bool = True

    def read(self, match: re.Match[str]) -> Piece:
        """What a match of `pattern` is."""
        raise NotImplementedError

    def without_calls(self) -> Self:
        """See `CompletionSyntax.without_calls`."""
        return replace(self, calls=False)

    def without_reasoning(self) -> Self:
        """See `CompletionSyntax.without_reasoning`: every piece says itself what it is."""
        return self

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedMessage:
        """See `CompletionSyntax.parse`."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        at = 0
        for match in self.pattern.finditer(text):
            content.append(text[at : match.start()])
            at = match.end()
            piece = self.read(match)
            content.append(self._shown(piece, match.group()))
            if piece.kind is Kind.REASONING:
                reasoning.append(piece.text)
            elif piece.kind is Kind.CALL and self.calls:
                if isinstance(call := piece.call(call_id(len(calls))), ToolCall):
                    calls.append(call)
                else:
                    malformed.append(call)
        content.append(text[at:])
        return ParsedMessage(
            content="".join(content),
            reasoning_content="\n".join(reasoning) or None,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
        )

    def _shown(self, piece: Piece, written: str) -> str:
        """What a piece adds to the content: a call that cannot be read stays there as it was written."""
        if piece.kind is Kind.CALL:
            return "" if self.calls and isinstance(piece.call(""), ToolCall) else written
        return piece.text if piece.kind is Kind.CONTENT else ""

    def so_far(self, text: str) -> Progress:
        """See `CompletionSyntax.so_far`.

        Content is known piece by piece, and within a piece of content as it grows. Another piece may always bring more
        reasoning, so that it is known at the end only.
        """
        known: list[str] = []
        at = 0
        for match in self.pattern.finditer(text):
            known.append(text[at : match.start()])
            at = match.end()
            piece = self.read(match)
            if at == len(text) and not match.group().endswith(tuple(self.ends)):
                if piece.kind is Kind.CONTENT:
                    known.append(text_before(piece.text, self.ends))
                break
            known.append(self._shown(piece, match.group()))
        return Progress(content="".join(known))


def json_object(text: str) -> dict[str, Any] | str:
    """The object that a call's text is, or what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    return value if isinstance(value, dict) else "not a JSON object"
