"""What every tool-call format gives, and how argument text is typed by a tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from miles_contracts import FunctionCall, ToolCall
from miles_rollout.parsers.message import CallId, Tools

_MAX_TAGS_IN_ARGUMENTS = 8


class ParsedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of looking for calls in a turn's text.

    Attributes:
        content: the text without the calls that could be read.
        tool_calls: the calls.
        malformed: why each unreadable call stayed in `content`.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


class CallFormat(Protocol):
    """A way of writing tool calls.

    Attributes:
        opening: the text that begins a call, before which all is content.
    """

    @property
    def opening(self) -> str: ...

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """Finds the calls in a turn's text (reasoning already taken off)."""
        ...


def make_call(name: str, arguments: str, identifier: str) -> ToolCall:
    """A call of the contracts."""
    return ToolCall(id=identifier, function=FunctionCall(name=name, arguments=arguments))


def joined(pieces: list[str], had_calls: bool) -> str:
    """What is left of the text; the white space that only set calls apart goes with them."""
    if not had_calls:
        return "".join(pieces)
    return "\n".join(p.strip("\n") for p in pieces if p.strip()).strip("\n")


def read_elements(text: str, opening: str, closing: str, read: Callable[[str, int], ToolCall | str]) -> ParsedCalls:
    """Reads the calls of a format that puts each between two tags.

    Args:
        text: the turn.
        opening: tag before a call.
        closing: tag behind it; a call at the very end of the turn may lack it.
        read: makes a call of the text between the tags and the number of calls before it, or says what is wrong.
    """
    kept: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    at = 0
    while (start := text.find(opening, at)) >= 0:
        kept.append(text[at:start])
        begin = start + len(opening)
        call, at = _read_element(text, begin, closing, lambda body: read(body, len(calls)))
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            malformed.append(call)
            kept.append(text[start:at])
    kept.append(text[at:])
    return ParsedCalls(content=joined(kept, bool(calls)), tool_calls=tuple(calls), malformed=tuple(malformed))


def _read_element(
    text: str, begin: int, closing: str, read: Callable[[str], ToolCall | str]
) -> tuple[ToolCall | str, int]:
    """A call and where it ends. A closing tag within an argument does not end it: the next ones are tried as well."""
    first = text.find(closing, begin)
    if first < 0:
        return read(text[begin:]), len(text)
    problem = read(text[begin:first])
    end = first
    for _ in range(_MAX_TAGS_IN_ARGUMENTS):
        if isinstance(problem, ToolCall) or end < 0:
            break
        end = text.find(closing, end + len(closing))
        longer = read(text[begin:end]) if end >= 0 else problem
        if isinstance(longer, ToolCall):
            return longer, end + len(closing)
    return problem, first + len(closing)


def parameter_types(tools: Tools, name: str) -> dict[str, Any]:
    """JSON-schema type of each declared parameter of a tool; a parameter without one maps to None."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if not isinstance(properties, Mapping):
                return {}
            return {
                key: schema.get("type") if isinstance(schema, Mapping) else None for key, schema in properties.items()
            }
    return {}


def typed_value(text: str, declared: Any) -> Any:
    """An argument written as bare text, as the value its schema type asks for.

    A text parameter stays text even if it looks like a number; without a declared type, what reads as JSON is JSON.
    Text that does not fit its declared type stays text: the tool will say what is wrong with it.
    """
    kinds = declared if isinstance(declared, list) else [declared]
    if "string" in kinds and len(kinds) == 1:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return _python_literal(text, kinds)
    if "string" in kinds and not _fits(value, kinds):
        return text
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are not JSON: keep the text


def _python_literal(text: str, kinds: list[Any]) -> Any:
    if "boolean" in kinds and text.strip() in ("True", "False"):
        return text.strip() == "True"
    if text.strip() == "None" and ("null" in kinds):
        return None
    return text


def _fits(value: Any, kinds: list[Any]) -> bool:
    kind = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", str: "string"}.get(
        type(value), "null"
    )
    return kind in kinds or (kind == "integer" and "number" in kinds)
