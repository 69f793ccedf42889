"""Chat messages off the wire, normalised so that equal means `==`.

One spelling for an empty value: content is text, or None exactly when an assistant message only carries tool
calls; empty reasoning is None. Fields that do not reach a prompt (the `index` of a tool call, an assistant's
`name`, anything a harness adds) are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from miles_contracts import FunctionCall, Message, ToolCall
from miles_rollout.session.errors import BadRequestError
from miles_rollout.session.wrong_type import refused

ROLES = ("system", "developer", "user", "assistant", "tool")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _WireFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _WireCall(msgspec.Struct):
    function: _WireFunction
    id: str | None = None
    type: str = "function"


class WireMessage(msgspec.Struct):
    """A message as clients send it; unknown keys are ignored."""

    role: str
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_WireCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(list[WireMessage])


def parse_messages(raw: bytes | memoryview, first_index: int = 0) -> tuple[Message, ...]:
    """Decode a JSON array of messages.

    Args:
        raw: the array.
        first_index: position of its first message in the whole request, for error messages.

    Raises:
        BadRequestError: malformed, an unknown role, or a content part that is not text.
    """
    try:
        wire = _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        raise refused(error, root="messages", first_index=first_index) from error
    return tuple(_normalise(m, first_index + i) for i, m in enumerate(wire))


def _normalise(wire: WireMessage, index: int) -> Message:
    where = f"messages[{index}]"
    if wire.role not in ROLES:
        raise BadRequestError(f"{where}.role: got {wire.role!r}; use one of {', '.join(ROLES)}", param=f"{where}.role")
    if bytes(wire.function_call) != b"null":
        raise BadRequestError(
            f"{where}.function_call is the retired form; send tool_calls", param=f"{where}.function_call"
        )
    content = _text(wire.content, where)
    if wire.role != "assistant":
        return Message(
            role=wire.role,
            content=content,
            tool_call_id=(wire.tool_call_id or None) if wire.role == "tool" else None,
            name=wire.name or None,
        )
    calls = tuple(_call(c) for c in wire.tool_calls or ())
    return assistant_message(content, wire.reasoning_content or wire.reasoning, calls)


def assistant_message(content: str | None, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    """An assistant's message in normal form."""
    return Message(
        role="assistant",
        content=content or (None if calls else ""),
        reasoning_content=reasoning or None,
        tool_calls=tuple(calls),
    )


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None:
            raise BadRequestError(
                f"{where}.content: part of type {part.type!r}; only text parts are supported", param=f"{where}.content"
            )
    return "".join(part.text or "" for part in content)


def _call(wire: _WireCall) -> ToolCall:
    arguments = wire.function.arguments
    if isinstance(arguments, dict):  # some harnesses decode them and send the object back
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(
        id=wire.id or "",
        type=wire.type,
        function=FunctionCall(name=wire.function.name, arguments=arguments or ""),
    )


def shorten(value: object, limit: int = 80) -> str:
    """`repr` of a value, cut for an error message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
