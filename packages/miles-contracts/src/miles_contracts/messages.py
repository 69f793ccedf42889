"""Chat messages in the OpenAI form, as agents send them and renderers read them."""

from __future__ import annotations

from typing import Any

import msgspec


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """Name and JSON-text arguments of a tool call, the text exactly as it was sampled or received."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool by the assistant."""

    id: str
    function: FunctionCall
    type: str = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message. `content` is text, or None when the message only carries tool calls."""

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The OpenAI JSON object, without empty fields other than role and content."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            out["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            out["tool_calls"] = [msgspec.to_builtins(c) for c in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out
