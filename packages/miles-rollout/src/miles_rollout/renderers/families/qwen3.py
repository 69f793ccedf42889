"""Qwen3: ChatML with reasoning between `<think>` tags that stays in the history."""

from __future__ import annotations

from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, JsonCalls, TaggedSyntax
from miles_rollout.renderers.families.chatml import ChatMLRenderer
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer

EMPTY_THINK = "<think>\n\n</think>\n\n"


class Qwen3Renderer(ChatMLRenderer):
    """Qwen3 hybrid models (thinking can be switched off per conversation).

    The published template removes the reasoning of turns before the last question and so rewrites history; here every
    turn keeps the reasoning it was sampled with. With thinking off, the empty reasoning block that opens the
    assistant's turn is part of each turn for the same reason.
    """

    name: ClassVar[str] = "qwen3"
    stop: ClassVar[tuple[str, ...]] = ("<|endoftext|>",)
    syntax: CompletionSyntax = TaggedSyntax(calls=JsonCalls())

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning block, answer, calls."""
        reasoning, content = split_reasoning(message)
        content = content.lstrip("\n")
        if reasoning:
            out.text("<think>\n")
            out.content(reasoning.strip("\n"))
            out.text("\n</think>\n\n")
        elif self.options.thinking is False:
            out.text(EMPTY_THINK)
        out.content(content)
        self.write_calls(out, message, bool(content))

    def write_generation_prompt(self, out: Writer) -> None:
        """The header, and the empty reasoning block when thinking is off."""
        super().write_generation_prompt(out)
        if self.options.thinking is False:
            out.text(EMPTY_THINK)
