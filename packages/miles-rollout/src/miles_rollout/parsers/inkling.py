"""Turns of Inkling: blocks of thinking, text and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import make_call
from miles_rollout.parsers.pieces import Kind, Piece, PiecedSyntax, json_object


@dataclass(frozen=True)
class InklingSyntax(PiecedSyntax):
    """Reads a turn as the sequence of its blocks."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:<\|message_model\|>)?([^<]*)<\|content_(text|thinking|invoke_tool_json)\|>(.*?)"
        r"(?:<\|end_message\|>|(?=<\|message_model\|>)|\Z)",
        re.DOTALL,
    )
    ends: ClassVar[Sequence[str]] = ("<|end_message|>", "<|message_model|>")

    def read(self, match: re.Match[str]) -> Piece:
        """See `PiecedSyntax.read`."""
        kind, body = match.group(2), match.group(3)
        if kind == "thinking":
            return Piece(Kind.REASONING, body)
        if kind == "text":
            return Piece(Kind.CONTENT, match.group(1) + body)
        return Piece(Kind.CALL, call=partial(_read_call, body))


def _read_call(body: str, identifier: str) -> ToolCall | str:
    value = json_object(body)
    if isinstance(value, str):
        return value
    if not isinstance(value.get("name"), str) or not value["name"]:
        return 'a call must be an object with a "name"'
    arguments = value.get("args", {})
    if not isinstance(arguments, dict):
        return '"args" must be an object'
    return make_call(value["name"], json.dumps(arguments, ensure_ascii=False), identifier)
