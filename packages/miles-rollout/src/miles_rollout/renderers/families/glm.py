"""GLM-4.5 to GLM-5: turns have no end token; the opening of the next turn is what the model stops with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, PairCalls, TaggedSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.jsontext import call_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer

TOOLS_BEFORE = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
)


class GlmRenderer(DialectRenderer):
    """GLM-4.7 and GLM-5 to 5.2.

    A sampled turn ends with `<|user|>` or `<|observation|>`; that token is kept and opens the turn that follows. When
    another kind of turn follows, its own opening is written behind the sampled token.
    """

    name: ClassVar[str] = "glm"
    models: ClassVar[str] = "GLM-4.7, GLM-5, GLM-5.1, GLM-5.2"
    checked: ClassVar[str] = "another implementation, of GLM-5 (renderers)"
    deviation: ClassVar[str] = "keeps earlier reasoning"
    stop: ClassVar[tuple[str, ...]] = ("<|user|>", "<|observation|>", "<|endoftext|>")
    required: ClassVar[tuple[str, ...]] = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")
    structural: ClassVar[frozenset[str]] = frozenset(
        {"[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"}
    )
    newline: ClassVar[str] = ""  # between the parts of a turn
    closed_think: ClassVar[str] = "</think>"  # what stands for reasoning that there is none of

    def turn_syntax(self) -> CompletionSyntax:
        """A turn begins inside its reasoning, unless thinking is off."""
        return TaggedSyntax(begins_inside=self.options.thinking is not False, calls=PairCalls())

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """Two prefix tokens, and the tools in a system turn of their own."""
        out.control("[gMASK]")
        out.control("<sop>")
        if tools:
            out.control("<|system|>")
            out.text(TOOLS_BEFORE)
            for tool in tools:
                out.content(to_json(tool))
                out.text("\n")
            n = self.newline
            pairs = "".join(
                f"<arg_key>{{arg-key-{i}}}</arg_key>{n}<arg_value>{{arg-value-{i}}}</arg_value>{n}" for i in (1, 2)
            )
            out.text(f"{TOOLS_AFTER}<tool_call>{{function-name}}{n}{pairs}...{n}</tool_call>")
        return 0

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn; neighbouring tool results share one."""
        message = messages[index]
        if message.role == "tool":
            if index == 0 or messages[index - 1].role != "tool":
                out.control("<|observation|>")
            out.text(self.newline + "<tool_response>" + self.newline)
            out.content(require_text(message, index))
            out.text(self.newline + "</tool_response>")
        elif message.role == "assistant":
            out.control("<|assistant|>")
            self.write_assistant(out, message)
        else:
            out.control("<|user|>" if message.role == "user" else "<|system|>")
            out.text(self.newline)
            out.content(require_text(message, index) + self.user_suffix(message))

    def user_suffix(self, message: Message) -> str:
        """What the family adds to a user's text."""
        return ""

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning, answer and calls, behind the opening."""
        reasoning, content = split_reasoning(message)
        if reasoning.strip():
            out.text(self.newline + "<think>")
            out.content(reasoning.strip())
            out.text("</think>")
        else:
            out.text(self.newline + self.closed_think)
        if content.strip():
            out.text(self.newline)
            out.content(content.strip())
        for call in message.tool_calls:
            n = self.newline
            out.text(n + "<tool_call>")
            out.content(call.function.name)
            out.text(n)
            for key, value in call_arguments(call).items():
                out.text("<arg_key>")
                out.content(key)
                out.text(f"</arg_key>{n}<arg_value>")
                out.content(value if isinstance(value, str) else to_json(value))
                out.text("</arg_value>" + n)
            out.text("</tool_call>")

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the turn and of its reasoning, already closed when thinking is off."""
        out.control("<|assistant|>")
        out.text("</think>" if self.options.thinking is False else "<think>")


class Glm45Renderer(GlmRenderer):
    """GLM-4.5 and 4.6, which put every part on a line of its own and let the model open the reasoning."""

    name: ClassVar[str] = "glm4_5"
    models: ClassVar[str] = "GLM-4.5, GLM-4.6"
    checked: ClassVar[str] = "the published template (as in trl)"
    newline: ClassVar[str] = "\n"
    closed_think: ClassVar[str] = "<think></think>"

    def turn_syntax(self) -> CompletionSyntax:
        """The model opens the reasoning itself."""
        return TaggedSyntax(calls=PairCalls())

    def user_suffix(self, message: Message) -> str:
        """The switch that turns thinking off, at the end of each question."""
        off = self.options.thinking is False and message.role == "user"
        return "/nothink" if off and not (message.content or "").endswith("/nothink") else ""

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the turn, with an empty reasoning block when thinking is off."""
        out.control("<|assistant|>")
        if self.options.thinking is False:
            out.text("\n<think></think>")
