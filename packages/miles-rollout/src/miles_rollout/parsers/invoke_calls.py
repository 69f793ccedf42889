"""Calls written as `<invoke name="f"><parameter name="k">v</parameter></invoke>` inside one block per turn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from miles_contracts import ToolCall
from miles_rollout.parsers.calls import ParsedCalls, joined, make_call, parameter_types, typed_value
from miles_rollout.parsers.message import CallId, Tools


@dataclass(frozen=True, kw_only=True)
class InvokeCalls:
    """One block with any number of `invoke` elements.

    Attributes:
        block: name of the block's tag, prefix included.
        prefix: what stands before the names of the inner tags.

    A parameter may say by `string="true"` or `string="false"` whether it is text or JSON; where it does not, the
    tool's schema decides.
    """

    block: str
    prefix: str = ""

    @property
    def opening(self) -> str:
        """The tag that begins the block."""
        return f"<{self.block}>"

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedCalls:
        """See `CallFormat.parse`."""
        kept: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        closing = f"</{self.block}>"
        at = 0
        while (start := text.find(self.opening, at)) >= 0:
            kept.append(text[at:start])
            end = text.find(closing, start)
            body = text[start + len(self.opening) : end if end >= 0 else len(text)]
            at = len(text) if end < 0 else end + len(closing)
            rest = self._read_block(body, tools, call_id, calls, malformed)
            if rest:
                kept.append(self.opening + rest + closing)
        kept.append(text[at:])
        return ParsedCalls(content=joined(kept, bool(calls)), tool_calls=tuple(calls), malformed=tuple(malformed))

    def _read_block(self, body: str, tools: Tools, call_id: CallId, calls: list[ToolCall], malformed: list[str]) -> str:
        """Adds the block's calls; returns the text of those that could not be read."""
        p = re.escape(self.prefix)
        invoke = re.compile(rf'\s*<{p}invoke name="([^"]*)">(.*?)</{p}invoke>\s*', re.DOTALL)
        unread: list[str] = []
        at = 0
        for match in invoke.finditer(body):
            if body[at : match.start()].strip():
                malformed.append(f"unexpected text between calls: {body[at : match.start()].strip()[:60]!r}")
                unread.append(body[at : match.start()])
            at = match.end()
            call = self._read_invoke(match.group(1), match.group(2), tools, call_id(len(calls)))
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                malformed.append(call)
                unread.append(match.group())
        if body[at:].strip() or at == 0:
            malformed.append(f"no readable call in {body[at:].strip()[:60]!r}")
            unread.append(body[at:])
        return "".join(unread)

    def _read_invoke(self, name: str, inner: str, tools: Tools, identifier: str) -> ToolCall | str:
        p = re.escape(self.prefix)
        parameter = re.compile(
            rf'\s*<{p}parameter name="([^"]*)"(?: string="(true|false)")?>(.*?)</{p}parameter>\s*', re.DOTALL
        )
        if not name:
            return "a call must name a tool"
        types = parameter_types(tools, name)
        arguments: dict[str, Any] = {}
        at = 0
        for match in parameter.finditer(inner):
            if inner[at : match.start()].strip():
                break
            key, is_text, value = match.groups()
            if key in arguments:
                return f"parameter {key!r} is given twice"
            if is_text == "false":
                try:
                    arguments[key] = json.loads(value)
                except ValueError:
                    return f"parameter {key!r} says that it is JSON and is not"
            else:
                arguments[key] = value if is_text == "true" else typed_value(value, types.get(key))
            at = match.end()
        if inner[at:].strip():
            return f"unexpected text in the call: {inner[at:].strip()[:60]!r}"
        return make_call(name, json.dumps(arguments, ensure_ascii=False), identifier)
