"""Turns of Inkling: blocks of thinking, text and calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import make_call
from miles_rollout.parsers.message import CallId, ParsedMessage, Progress, Tools

_BLOCK = re.compile(
    r"(?:<\|message_model\|>)?([^<]*)<\|content_(text|thinking|invoke_tool_json)\|>(.*?)"
    r"(?:<\|end_message\|>|(?=<\|message_model\|>)|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class InklingSyntax:
    """Reads a turn as the sequence of its blocks."""

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedMessage:
        """See `CompletionSyntax.parse`."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        at = 0
        for block in _BLOCK.finditer(text):
            content.append(text[at : block.start()])
            at = block.end()
            kind, body = block.group(2), block.group(3)
            if kind == "thinking":
                reasoning.append(body)
            elif kind == "text":
                content.append(block.group(1) + body)
            else:
                call = _read_call(body, call_id(len(calls)))
                if isinstance(call, ToolCall):
                    calls.append(call)
                else:
                    malformed.append(call)
                    content.append(block.group())
        content.append(text[at:])
        return ParsedMessage(
            content="".join(content),
            reasoning_content="\n".join(reasoning) or None,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
        )

    def so_far(self, text: str) -> Progress:
        """See `CompletionSyntax.so_far`. A block is known for what it is only when it has ended."""
        return Progress()


def _read_call(body: str, identifier: str) -> ToolCall | str:
    try:
        value = json.loads(body)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return 'a call must be an object with a "name"'
    arguments = value.get("args", {})
    if not isinstance(arguments, dict):
        return '"args" must be an object'
    return make_call(value["name"], json.dumps(arguments, ensure_ascii=False), identifier)
