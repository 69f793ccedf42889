"""Turns of gpt-oss: messages with channels; analysis is reasoning, a recipient makes a message a call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import make_call
from miles_rollout.parsers.message import CallId, ParsedMessage, Progress, Tools

_PIECE = re.compile(
    r"(?:<\|start\|>assistant)?([^<]*)(?:<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?)?<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(\S+)")


@dataclass(frozen=True)
class HarmonySyntax:
    """Reads a turn as the sequence of its messages."""

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedMessage:
        """See `CompletionSyntax.parse`."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        at = 0
        for piece in _PIECE.finditer(text):
            content.append(text[at : piece.start()])
            at = piece.end()
            header, channel, body = piece.group(1), (piece.group(2) or "").strip(), piece.group(3)
            recipient = _RECIPIENT.search(f"{header} {channel}")
            if recipient:
                call = _read_call(recipient.group(1), body, call_id(len(calls)))
                if isinstance(call, ToolCall):
                    calls.append(call)
                else:
                    malformed.append(call)
                    content.append(piece.group())
            elif channel.split(" ")[0] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
        content.append(text[at:])
        return ParsedMessage(
            content="".join(content),
            reasoning_content="\n".join(reasoning) or None,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
        )

    def so_far(self, text: str) -> Progress:
        """See `CompletionSyntax.so_far`. A message is known for what it is only when it has ended."""
        return Progress()


def _read_call(recipient: str, body: str, identifier: str) -> ToolCall | str:
    name = recipient.removeprefix("functions.")
    if not name:
        return "a call must name a tool"
    try:
        value = json.loads(body)
    except ValueError as error:
        return f"arguments are not JSON: {error}"
    if not isinstance(value, dict):
        return "arguments must be an object"
    return make_call(name, body.strip(), identifier)
