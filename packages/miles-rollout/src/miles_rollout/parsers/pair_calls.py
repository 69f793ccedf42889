"""Calls written as a name and then keys and values between `<arg_key>` and `<arg_value>` tags."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import ParsedCalls, make_call, parameter_types, read_elements, typed_value
from miles_rollout.parsers.message import CallId, Tools

_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class PairCalls:
    """One call per pair of tags; values are bare text, typed by the tool's schema."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """See `CallFormat.parse`."""
        return read_elements(
            text, self.opening, self.closing, lambda body, index: _read_call(body, tools, call_id(index))
        )


def _read_call(body: str, tools: Tools, identifier: str) -> ToolCall | str:
    name, tag, _ = body.partition("<arg_key>")
    inner = body[len(name) :] if tag else ""
    name = name.strip()
    if not name or "<" in name:
        return "a call must begin with the name of a tool"
    types = parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    at = 0
    for pair in _PAIR.finditer(inner):
        if pair.start() != at:
            break
        key, value = pair.group(1).strip(), pair.group(2)
        if key in arguments:
            return f"argument {key!r} is given twice"
        arguments[key] = typed_value(value, types.get(key))
        at = pair.end()
    if inner[at:].strip():
        return f"unexpected text in the call: {inner[at:].strip()[:60]!r}"
    return make_call(name, json.dumps(arguments, ensure_ascii=False), identifier)
