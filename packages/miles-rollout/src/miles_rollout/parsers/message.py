"""What a client sees of a sampled turn, and the one function that makes it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from miles_contracts import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
CallId = Callable[[int], str]


class ParsedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled turn as a client sees it.

    Attributes:
        content: the answer, "" when there is none; text of calls that could not be read is in it.
        reasoning_content: what was thought before the answer, or None when there was no reasoning.
        tool_calls: the calls that could be read, arguments as JSON text.
        malformed: why each unreadable call was left in `content`; empty when all was well.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()

    def to_message(self) -> Message:
        """The assistant message of the contracts; content is None when there are only calls."""
        return Message(
            role="assistant",
            content=self.content if self.content or not self.tool_calls else None,
            reasoning_content=self.reasoning_content,
            tool_calls=self.tool_calls,
        )


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What is certain of a turn that is still being sampled.

    Attributes:
        content: text that the finished turn's content begins with.
        reasoning_content: the finished turn's reasoning, or None when that is not known yet or there is none.
    """

    content: str = ""
    reasoning_content: str | None = None


class CompletionSyntax(Protocol):
    """How a model family writes a turn."""

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedMessage:
        """Reads one turn, control tokens included in the text, the final stop token not."""
        ...

    def so_far(self, text: str) -> Progress:
        """Reads the beginning of a turn: what `parse` will say whatever follows, nothing when in doubt."""
        ...

    def without_calls(self) -> CompletionSyntax:
        """The same syntax for a client that wants no calls: they stay content, as they were written."""
        ...

    def without_reasoning(self) -> CompletionSyntax:
        """The same syntax for a turn that begins with a call, so that nothing before the call is reasoning."""
        ...


def parse_completion(
    text: str, syntax: CompletionSyntax, tools: Tools = (), *, call_id: CallId | None = None
) -> ParsedMessage:
    """Reads a sampled turn.

    Args:
        text: the decoded turn with its control tokens, without the final stop token.
        syntax: the family's way of writing (`renderer.turn_syntax()`).
        tools: OpenAI tool objects of the request; their schemas tell text arguments from numbers.
        call_id: id of the n-th call where the model writes none; random when not given.

    Returns:
        The view; anything that is not understood stays in `content`.
    """
    return syntax.parse(text, tools, call_id or _random_id)


def _random_id(index: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def text_before(text: str, markers: Sequence[str]) -> str:
    """Text in front of the first marker, and of an end that may become one when the text goes on."""
    starts = [at for marker in markers if (at := text.find(marker)) >= 0]
    if starts:
        return text[: min(starts)]
    longest = max(map(len, markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(marker.startswith(end) for marker in markers):
            return text[:-size]
    return text
