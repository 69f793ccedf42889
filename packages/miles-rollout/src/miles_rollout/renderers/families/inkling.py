"""Inkling: a flat sequence of blocks, each opened by who speaks and what it is, each closed by one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, InklingSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.jsontext import call_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.writer import Writer

MODEL, USER, SYSTEM, TOOL = "<|message_model|>", "<|message_user|>", "<|message_system|>", "<|message_tool|>"
TEXT, THINKING, XML = "<|content_text|>", "<|content_thinking|>", "<|content_xml|>"
INVOKE, END_BLOCK = "<|content_invoke_tool_json|>", "<|end_message|>"
END_TURN = "<|content_model_end_sampling|>"
EFFORTS = {"none": "0", "minimal": "0.1", "low": "0.2", "medium": "0.7", "high": "0.9", "max": "0.99"}


class InklingRenderer(DialectRenderer):
    """Inkling and Inkling-Small; reasoning stays in the history in the published form too."""

    name: ClassVar[str] = "inkling"
    models: ClassVar[str] = "Inkling, Inkling-Small"
    checked: ClassVar[str] = "the maker's renderer (tml-renderers)"
    efforts: ClassVar[tuple[str, ...]] = tuple(EFFORTS)
    end: ClassVar[str] = END_TURN
    required: ClassVar[tuple[str, ...]] = (MODEL, USER, SYSTEM, TOOL, TEXT, THINKING, XML, INVOKE, END_BLOCK)
    structural: ClassVar[frozenset[str]] = frozenset({*required, END_TURN})

    def turn_syntax(self) -> CompletionSyntax:
        """Blocks."""
        return InklingSyntax()

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The tools, the leading system messages, the effort."""
        if tools:
            out.control(SYSTEM)
            out.text("tool_declare")
            out.control(XML)
            out.content(to_json([_declaration(tool) for tool in tools], separators=(",", ":"), sort_keys=True))
            out.control(END_BLOCK)
        used = 0
        while used < len(messages) and messages[used].role in ("system", "developer"):
            self.write_message(out, messages, used)
            used += 1
        effort = "none" if self.options.thinking is False else self.options.reasoning_effort or "high"
        _write_block(out, SYSTEM, "", TEXT, f"Thinking effort level: {EFFORTS[effort]}")
        return used

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One block, or the several of an assistant turn."""
        message = messages[index]
        if message.role == "assistant":
            self._write_assistant(out, message)
        elif message.role == "tool":
            _write_block(out, TOOL, _tool_name(messages, index), TEXT, require_text(message, index))
        else:
            _write_block(out, USER if message.role == "user" else SYSTEM, "", TEXT, require_text(message, index))

    def _write_assistant(self, out: Writer, message: Message) -> None:
        if message.reasoning_content:
            _write_block(out, MODEL, "", THINKING, message.reasoning_content)
        if message.content is not None and (message.content or not message.tool_calls):
            _write_block(out, MODEL, "", TEXT, message.content)
        for call in message.tool_calls:
            name = to_json(call.function.name)
            arguments = to_json(call_arguments(call), separators=(",", ":"), sort_keys=True)
            _write_block(out, MODEL, call.function.name, INVOKE, f'{{"name":{name},"args":{arguments}}}')
        out.control(END_TURN)

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the first block."""
        out.control(MODEL)


def _write_block(out: Writer, author: str, name: str, kind: str, text: str) -> None:
    out.control(author)
    out.content(name)
    out.control(kind)
    out.content(text)
    out.control(END_BLOCK)


def _declaration(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "description": function.get("description") or "",
        "name": function.get("name"),
        "parameters": function.get("parameters") or {},
        "type": tool.get("type") or "function",
    }


def _tool_name(messages: Sequence[Message], index: int) -> str:
    """Name of the tool that answers: its own, else that of the call with its id, else none."""
    message = messages[index]
    if message.name:
        return message.name
    for earlier in reversed(messages[:index]):
        for call in earlier.tool_calls:
            if call.id == message.tool_call_id:
                return call.function.name
    return ""
