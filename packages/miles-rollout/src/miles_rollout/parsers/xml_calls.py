"""Calls written as `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import ParsedCalls, make_call, parameter_types, read_elements, typed_value
from miles_rollout.parsers.message import CallId, Tools

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class XmlCalls:
    """One function element per pair of tags; values are bare text, typed by the tool's schema."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """See `CallFormat.parse`."""
        return read_elements(
            text, self.opening, self.closing, lambda body, index: _read_function(body, tools, call_id(index))
        )


def _read_function(body: str, tools: Tools, identifier: str) -> ToolCall | str:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return "needs exactly one <function=NAME>...</function>"
    name, inner = match.group(1).strip(), match.group(2)
    types = parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    at = 0
    for parameter in _PARAMETER.finditer(inner):
        if inner[at : parameter.start()].strip():
            return f"unexpected text in the call: {inner[at : parameter.start()].strip()[:60]!r}"
        key, value = parameter.group(1).strip(), parameter.group(2)
        if key in arguments:
            return f"parameter {key!r} is given twice"
        arguments[key] = typed_value(value.removeprefix("\n").removesuffix("\n"), types.get(key))
        at = parameter.end()
    if inner[at:].strip():
        return f"unexpected text in the call: {inner[at:].strip()[:60]!r}"
    return make_call(name, json.dumps(arguments, ensure_ascii=False), identifier)
