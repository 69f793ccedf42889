"""Calls between Kimi's control tokens, each with the id that the model chose (`functions.NAME:COUNTER`)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import ParsedCalls, make_call, read_elements
from miles_rollout.parsers.message import CallId, Tools

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


@dataclass(frozen=True, kw_only=True)
class KimiCalls:
    """A section with one call after another."""

    opening: str = _SECTION[0]

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """See `CallFormat.parse`."""
        found = read_elements(text, "<|tool_call_begin|>", "<|tool_call_end|>", _read_call)
        if found.malformed:
            return found
        content = found.content
        for tag in _SECTION:
            content = content.replace(tag, "")
        return ParsedCalls(content=content.strip("\n") if found.tool_calls else content, tool_calls=found.tool_calls)


def _read_call(body: str, index: int) -> ToolCall | str:
    identifier, tag, arguments = body.partition("<|tool_call_argument_begin|>")
    identifier = identifier.strip()
    name = identifier.removeprefix("functions.").rpartition(":")[0] or identifier.removeprefix("functions.")
    if not tag or not name:
        return "a call needs an id that names a tool, and arguments"
    try:
        value = json.loads(arguments)
    except ValueError as error:
        return f"arguments are not JSON: {error}"
    if not isinstance(value, dict):
        return "arguments must be an object"
    return make_call(name, arguments.strip(), identifier)
