"""Turns of gpt-oss: messages with channels; analysis is reasoning, a recipient makes a message a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import make_call
from miles_rollout.parsers.pieces import Kind, Piece, PiecedSyntax, json_object

_RECIPIENT = re.compile(r"to=(\S+)")


@dataclass(frozen=True)
class HarmonySyntax(PiecedSyntax):
    """Reads a turn as the sequence of its messages."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:<\|start\|>assistant)?([^<]*)(?:<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?)?<\|message\|>"
        r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|\Z)",
        re.DOTALL,
    )
    ends: ClassVar[Sequence[str]] = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")

    def read(self, match: re.Match[str]) -> Piece:
        """See `PiecedSyntax.read`."""
        header, channel, body = match.group(1), (match.group(2) or "").strip(), match.group(3)
        recipient = _RECIPIENT.search(f"{header} {channel}")
        if recipient:
            return Piece(Kind.CALL, call=partial(_read_call, recipient.group(1), body))
        return Piece(Kind.REASONING if channel.split(" ")[0] == "analysis" else Kind.CONTENT, body)


def _read_call(recipient: str, body: str, identifier: str) -> ToolCall | str:
    name = recipient.removeprefix("functions.")
    if not name:
        return "a call must name a tool"
    arguments = json_object(body)
    return arguments if isinstance(arguments, str) else make_call(name, body.strip(), identifier)
