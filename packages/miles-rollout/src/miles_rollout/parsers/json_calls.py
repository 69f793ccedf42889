"""Calls written as JSON objects between two tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from json import JSONDecodeError

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import ParsedCalls, joined, make_call
from miles_rollout.parsers.message import CallId, Tools

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class JsonCalls:
    """One JSON object with a name and arguments per pair of tags."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """See `CallFormat.parse`. A call whose closing tag is missing at the end of the turn still counts if whole."""
        kept: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        at = 0
        while (start := text.find(self.opening, at)) >= 0:
            kept.append(text[at:start])
            body = start + len(self.opening)
            # The body is read as JSON first, so that a closing tag inside a string does not end the call.
            call, stop, problem = _read_call(text, body, call_id(len(calls)))
            end = text.find(self.closing, body if stop is None else stop)
            at = len(text) if end < 0 else end + len(self.closing)
            between = text[stop : end if end >= 0 else len(text)].strip() if stop is not None else ""
            if call is not None and not between:
                calls.append(call)
            else:
                malformed.append(problem or f"text after the call: {between[:60]!r}")
                kept.append(text[start:at])
        kept.append(text[at:])
        return ParsedCalls(content=joined(kept, bool(calls)), tool_calls=tuple(calls), malformed=tuple(malformed))


def _read_call(text: str, start: int, identifier: str) -> tuple[ToolCall | None, int | None, str]:
    """The call, where its JSON ends, and what was wrong with it."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, stop = _DECODER.raw_decode(text, begin)
    except JSONDecodeError as error:
        return None, None, f"not JSON: {error.msg} at character {error.pos - start}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None, stop, 'a call must be an object with a "name"'
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return make_call(value["name"], arguments, identifier), stop, ""
    if not isinstance(arguments, dict):
        return None, stop, '"arguments" must be an object'
    return make_call(value["name"], _raw_arguments(text[begin:stop], arguments), identifier), stop, ""


def _raw_arguments(call: str, arguments: dict[str, object]) -> str:
    """The arguments as the model spelled them, when they can be found as one piece of the call's text."""
    for key in ('"arguments"', '"parameters"'):
        at = call.find(key)
        while at >= 0:
            rest = call[at + len(key) :].lstrip()
            if rest.startswith(":"):
                body = rest[1:].lstrip()
                try:
                    value, stop = _DECODER.raw_decode(body)
                except JSONDecodeError:
                    value, stop = None, 0
                if value == arguments:
                    return body[:stop]
            at = call.find(key, at + 1)
    return json.dumps(arguments, ensure_ascii=False)
