"""Calls of Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>` with strings between quote tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import ParsedCalls, make_call, read_elements
from miles_rollout.parsers.message import CallId, Tools

QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call:([^{\s]+)\s*")
_KEY = re.compile(r"\s*([^:{}\[\],\s]+)\s*:")
_SCALAR = re.compile(r"[^,\]}\s]+")


@dataclass(frozen=True, kw_only=True)
class GemmaCalls:
    """One call per pair of tags."""

    opening: str = "<|tool_call>"
    closing: str = "<tool_call|>"

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """See `CallFormat.parse`."""
        return read_elements(text, self.opening, self.closing, lambda body, index: _read_call(body, call_id(index)))


def _read_call(body: str, identifier: str) -> ToolCall | str:
    name = _NAME.match(body)
    if name is None:
        return "a call must begin with call:NAME"
    try:
        value, at = _value(body, name.end())
    except ValueError as error:
        return str(error)
    if not isinstance(value, dict) or body[at:].strip():
        return "arguments must be one object"
    return make_call(name.group(1), json.dumps(value, ensure_ascii=False), identifier)


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at` and where it ends.

    Raises:
        ValueError: there is none.
    """
    while at < len(text) and text[at].isspace():
        at += 1
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise ValueError("a string is not closed")
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith("{", at):
        return _object(text, at + 1)
    if text.startswith("[", at):
        return _array(text, at + 1)
    scalar = _SCALAR.match(text, at)
    if scalar is None:
        raise ValueError(f"no value at character {at}")
    try:
        return json.loads(scalar.group()), scalar.end()
    except ValueError:
        raise ValueError(f"{scalar.group()[:40]!r} is not a value") from None


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    out: dict[str, Any] = {}
    while not _closes(text, at, "}"):
        if text.startswith(QUOTE, at):
            key, at = _value(text, at)
            if not text.startswith(":", at):
                raise ValueError(f"no value for {key!r}")
            at += 1
        else:
            match = _KEY.match(text, at)
            if match is None:
                raise ValueError(f"no key at character {at}")
            key, at = match.group(1), match.end()
        if key in out:
            raise ValueError(f"{key!r} is given twice")
        out[key], at = _value(text, at)
        at = _after_comma(text, at, "}")
    return out, text.index("}", at) + 1


def _array(text: str, at: int) -> tuple[list[Any], int]:
    out: list[Any] = []
    while not _closes(text, at, "]"):
        value, at = _value(text, at)
        out.append(value)
        at = _after_comma(text, at, "]")
    return out, text.index("]", at) + 1


def _closes(text: str, at: int, bracket: str) -> bool:
    return text[at:].lstrip().startswith(bracket)


def _after_comma(text: str, at: int, bracket: str) -> int:
    rest = text[at:].lstrip()
    if rest.startswith(","):
        return len(text) - len(rest) + 1
    if not rest.startswith(bracket):
        raise ValueError(f"expected a comma or {bracket!r} at character {at}")
    return at
