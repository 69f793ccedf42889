"""Kimi K2 models: one role token, a name and a middle token before each text; calls between control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, KimiCalls, TaggedSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.families.typescript import kimi_declarations
from miles_rollout.renderers.jsontext import normalised_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer

MIDDLE, END = "<|im_middle|>", "<|im_end|>"
_ROLES = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}


class Kimi25Renderer(DialectRenderer):
    """Kimi K2.5 and K2.6: tools declared in TypeScript, a reasoning block in every assistant turn."""

    name: ClassVar[str] = "kimi_k2_5"
    models: ClassVar[str] = "Kimi K2.5, Kimi K2.6"
    checked: ClassVar[str] = "another implementation (renderers)"
    deviation: ClassVar[str] = "keeps earlier reasoning"
    end: ClassVar[str] = END
    stop: ClassVar[tuple[str, ...]] = ("[EOS]",)
    required: ClassVar[tuple[str, ...]] = (MIDDLE, "<|im_user|>", "<|im_assistant|>", "<|im_system|>")
    structural: ClassVar[frozenset[str]] = frozenset(
        {MIDDLE, END, "<|im_user|>", "<|im_assistant|>", "<|im_system|>"}
        | {f"<|tool_{part}|>" for part in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")}
        | {"<|tool_call_argument_begin|>"}
    )

    def turn_syntax(self) -> CompletionSyntax:
        """A turn begins inside its reasoning, unless thinking is off."""
        return TaggedSyntax(begins_inside=self.options.thinking is not False, calls=KimiCalls(), strip="")

    def declare(self, tools: Tools) -> str:
        """The tools as this model reads them."""
        return kimi_declarations(tools)

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The tools, in a system turn of their own."""
        if tools:
            out.control("<|im_system|>")
            out.text("tool_declare")
            out.control(MIDDLE)
            out.content(self.declare(tools))
            out.control(END)
        return 0

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn."""
        message = messages[index]
        out.control(_ROLES.get(message.role, "<|im_system|>"))
        role = "system" if message.role == "developer" else message.role
        out.content(message.name or role)
        out.control(MIDDLE)
        if message.role == "assistant":
            self.write_assistant(out, message)
        else:
            if message.role == "tool":
                out.text("## Return of ")
                out.content(f"{message.tool_call_id or ''}\n")
            out.content(require_text(message, index))
        out.control(END)

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning block, answer, calls."""
        reasoning, content = split_reasoning(message)
        out.text("<think>")
        out.content("" if self.options.thinking is False else reasoning)
        out.text("</think>")
        out.content(content)
        self.write_calls(out, message)

    def write_calls(self, out: Writer, message: Message) -> None:
        """The calls, each with the id that its result will name."""
        if not message.tool_calls:
            return
        out.control("<|tool_calls_section_begin|>")
        for call in message.tool_calls:
            out.control("<|tool_call_begin|>")
            out.content(call.id)
            out.control("<|tool_call_argument_begin|>")
            out.content(normalised_arguments(call.function.arguments))
            out.control("<|tool_call_end|>")
        out.control("<|tool_calls_section_end|>")

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header and the opening of the reasoning, or its empty block when thinking is off."""
        out.control("<|im_assistant|>")
        out.text("assistant")
        out.control(MIDDLE)
        out.text("<think></think>" if self.options.thinking is False else "<think>")


class KimiK2Renderer(Kimi25Renderer):
    """Kimi K2 Instruct and K2 Thinking: tools declared in JSON, a fixed system prompt when there is none.

    Only the thinking model reasons, and it opens the reasoning itself; `RenderOptions.thinking` says which one it is
    when the folder has no template.
    """

    name: ClassVar[str] = "kimi_k2"
    models: ClassVar[str] = "Kimi K2 Instruct, Kimi K2 Thinking"
    checked: ClassVar[str] = "another implementation, of K2 Instruct (renderers)"
    default_system: ClassVar[str] = "You are Kimi, an AI assistant created by Moonshot AI."

    @property
    def thinks(self) -> bool:
        """True for the thinking model."""
        if self.options.thinking is not None:
            return self.options.thinking
        return "<think>" in (self.folder.chat_template or "")

    def turn_syntax(self) -> CompletionSyntax:
        """The thinking model opens its reasoning itself."""
        return TaggedSyntax(opening="<think>" if self.thinks else None, calls=KimiCalls(), strip="")

    def declare(self, tools: Tools) -> str:
        """Compact JSON, keys in alphabetical order."""
        return to_json([dict(tool) for tool in tools], separators=(",", ":"), sort_keys=True)

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The tools, and a system prompt when the conversation brings none."""
        super().write_head(out, messages, tools)
        if not messages or messages[0].role not in ("system", "developer"):
            out.control("<|im_system|>")
            out.text("system")
            out.control(MIDDLE)
            out.text(self.default_system)
            out.control(END)
            out.text("\n")
        return 0

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning block (thinking model only), answer, calls."""
        reasoning, content = split_reasoning(message)
        if self.thinks:
            out.text("<think>")
            out.content(reasoning)
            out.text("</think>")
        out.content(content)
        self.write_calls(out, message)

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header."""
        out.control("<|im_assistant|>")
        out.text("assistant")
        out.control(MIDDLE)
