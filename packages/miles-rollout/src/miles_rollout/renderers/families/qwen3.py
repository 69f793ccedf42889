"""Qwen3 in its three forms: ChatML with reasoning between `<think>` tags that stays in the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, JsonCalls, TaggedSyntax, XmlCalls
from miles_rollout.renderers.base import require_text
from miles_rollout.renderers.errors import RenderError
from miles_rollout.renderers.families.chatml import START, ChatMLRenderer
from miles_rollout.renderers.jsontext import call_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer

EMPTY_THINK = "<think>\n\n</think>\n\n"

XML_TOOLS_BEFORE = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
XML_TOOLS_AFTER = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified "
    "format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural "
    "language BEFORE the function call, but NOT after\n- If there is no function call available, answer the question "
    "like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>"
)


class Qwen3Renderer(ChatMLRenderer):
    """Qwen3 hybrid models, whose thinking can be switched off for a conversation.

    The published template removes the reasoning of turns before the last question and so rewrites history; here every
    turn keeps the reasoning it was sampled with. With thinking off, the empty reasoning block that opens the
    assistant's turn is part of each turn for the same reason.
    """

    name: ClassVar[str] = "qwen3"
    models: ClassVar[str] = "Qwen3 (hybrid thinking)"
    checked: ClassVar[str] = "the published template (as in trl)"
    thinking_choices: ClassVar[tuple[bool, ...]] = (True, False)
    deviation: ClassVar[str] = "keeps earlier reasoning"
    stop: ClassVar[tuple[str, ...]] = ("<|endoftext|>",)

    def turn_syntax(self) -> CompletionSyntax:
        """The model opens the reasoning itself; with thinking off it was closed in the prompt."""
        return TaggedSyntax(calls=JsonCalls())

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

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header, and the empty reasoning block when thinking is off."""
        super().write_generation_prompt(out, previous)
        if self.options.thinking is False:
            out.text(EMPTY_THINK)


class Qwen3NextRenderer(Qwen3Renderer):
    """Qwen3-Next and the Qwen3 2507 models, which either always reason or never do.

    Which of the two a model is shows in its template (`<think>` or not); `RenderOptions.thinking` overrides. The
    thinking form opens the reasoning itself, so a sampled turn begins inside it.
    """

    name: ClassVar[str] = "qwen3_next"
    models: ClassVar[str] = "Qwen3-Next, Qwen3 2507 (Thinking and Instruct)"
    checked: ClassVar[str] = "templates in miles-tito-tokenizers (Thinking) and trl (Instruct 2507)"

    @property
    def thinks(self) -> bool:
        """True for the thinking form."""
        if self.options.thinking is not None:
            return self.options.thinking
        return self.folder.chat_template is None or "<think>" in self.folder.chat_template

    def turn_syntax(self) -> CompletionSyntax:
        """A thinking model's turn begins inside its reasoning; an instruct model's has none."""
        opening = "<think>" if self.thinks else None
        return TaggedSyntax(opening=opening, begins_inside=True, calls=JsonCalls())

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning block (thinking form only), answer, calls."""
        reasoning, content = split_reasoning(message)
        content = content.lstrip("\n")
        if self.thinks and reasoning:
            out.text("<think>\n")
            out.content(reasoning.strip("\n"))
            out.text("\n</think>\n\n")
        out.content(content)
        self.write_calls(out, message, bool(content))

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header, and the opening of the reasoning in the thinking form."""
        ChatMLRenderer.write_generation_prompt(self, out, previous)
        if self.thinks:
            out.text("<think>\n")


class Qwen35Renderer(ChatMLRenderer):
    """Qwen3.5, 3.6 and 3.8: tools before the system text, calls as XML, reasoning block in every turn.

    The templates differ in how they spell arguments that are not text: Qwen3.5 prints plain values as Python does
    (`True`), the later ones as JSON (`true`); the template in the folder decides.
    """

    name: ClassVar[str] = "qwen3_5"
    models: ClassVar[str] = "Qwen3.5, Qwen3.6, Qwen3.8"
    checked: ClassVar[str] = "the published templates (as in trl)"
    thinking_choices: ClassVar[tuple[bool, ...]] = (True, False)
    deviation: ClassVar[str] = "keeps earlier reasoning; system message only at the start"
    stop: ClassVar[tuple[str, ...]] = ("<|endoftext|>",)

    @property
    def thinks(self) -> bool:
        """True unless thinking is off; the small models of Qwen3.5 think only when asked to, as their template says."""
        if self.options.thinking is not None:
            return self.options.thinking
        return "enable_thinking is defined and enable_thinking is true" not in (self.folder.chat_template or "")

    def turn_syntax(self) -> CompletionSyntax:
        """A turn begins inside its reasoning, unless thinking is off and the block was closed in the prompt."""
        return TaggedSyntax(begins_inside=self.thinks, calls=XmlCalls())

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """One system turn: what the effort asks for, the tools, the system text."""
        leading = 1 if messages and messages[0].role in ("system", "developer") else 0
        system = require_text(messages[0], 0).strip() if leading else ""
        effort = self._effort_text()
        if not tools and not leading and not effort:
            return 0
        out.control(START)
        out.text("system\n")
        if tools:
            out.text(effort + XML_TOOLS_BEFORE)
            for tool in tools:
                out.text("\n")
                out.content(to_json(tool))
            out.text(XML_TOOLS_AFTER + ("\n\n" if system else ""))
        else:
            out.text(effort if system else effort.removesuffix("\n\n"))
        out.content(system)
        out.control(self.end)
        out.text(self.glue)
        return leading

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn; text is trimmed as these templates do."""
        message = messages[index]
        if message.role in ("system", "developer"):
            raise RenderError(
                f"messages[{index}].role: {self.name} takes a system message only at the start; send it as the user's"
            )
        if message.role in ("user", "tool"):
            messages = [*messages[:index], _trimmed(message, index), *messages[index + 1 :]]
        super().write_message(out, messages, index)

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning block (empty if need be), answer, calls."""
        reasoning, content = split_reasoning(message)
        out.text("<think>\n")
        out.content(reasoning.strip())
        out.text("\n</think>\n\n")
        out.content(content.strip())
        self.write_calls(out, message, bool(content.strip()))

    def write_calls(self, out: Writer, message: Message, after_text: bool) -> None:
        """The calls, one XML element each."""
        json_values = self.folder.chat_template is None or "is string else args_value | tojson" in (
            self.folder.chat_template
        )
        for index, call in enumerate(message.tool_calls):
            between = "\n" if index else ("\n\n" if after_text else "")
            out.text(between + "<tool_call>\n")
            out.content(f"<function={call.function.name}>\n")
            for key, value in call_arguments(call).items():
                plain = isinstance(value, str) or not (json_values or isinstance(value, (dict, list)))
                out.content(f"<parameter={key}>\n" + (str(value) if plain else to_json(value)) + "\n</parameter>\n")
            out.text("</function>\n</tool_call>")

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header and the opening of the reasoning, or its empty block when thinking is off."""
        super().write_generation_prompt(out, previous)
        out.text("<think>\n" if self.thinks else EMPTY_THINK)

    def known_efforts(self) -> tuple[str, ...]:
        """Those of Qwen3.8; the others have no such switch."""
        return tuple(_EFFORT) if "reasoning_effort" in (self.folder.chat_template or "") else ()

    def _effort_text(self) -> str:
        """What Qwen3.8 puts first for a reasoning effort."""
        if not self.known_efforts() or not self.thinks:
            return ""
        return _EFFORT[self.options.reasoning_effort or "xhigh"]


_EFFORT = {
    "xhigh": (
        "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
        "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer.\n\n"
    ),
    "medium": "",
    "low": (
        "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion "
        "without unnecessary elaboration.\n\n"
    ),
}


def _trimmed(message: Message, index: int) -> Message:
    return Message(role=message.role, content=require_text(message, index).strip())
