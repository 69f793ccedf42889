"""gpt-oss (harmony): every piece of a turn is a message of its own, with a channel and perhaps a recipient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, HarmonySyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.errors import RenderError
from miles_rollout.renderers.families.typescript import harmony_declarations
from miles_rollout.renderers.jsontext import normalised_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.writer import Writer

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"


class HarmonyRenderer(DialectRenderer):
    """gpt-oss 20b and 120b.

    The published template drops the analysis of finished turns and turns the sampled `<|return|>` into `<|end|>`;
    both rewrite what was sampled, so here both stay. Several calls in one turn are written one after the other (the
    model itself stops after each).
    """

    name: ClassVar[str] = "gpt_oss"
    models: ClassVar[str] = "gpt-oss 20b, 120b"
    deviation: ClassVar[str] = "keeps earlier analysis, and <|return|> behind earlier answers"
    checked: ClassVar[str] = "the published template (as in trl)"
    thinking_choices: ClassVar[tuple[bool, ...]] = (True,)
    efforts: ClassVar[tuple[str, ...]] = ("low", "medium", "high")
    end: ClassVar[str] = RETURN
    stop: ClassVar[tuple[str, ...]] = (CALL,)
    required: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, END, CALL)
    structural: ClassVar[frozenset[str]] = frozenset({START, CHANNEL, MESSAGE, END, RETURN, CALL, "<|constrain|>"})

    def turn_syntax(self) -> CompletionSyntax:
        """Messages with channels."""
        return HarmonySyntax()

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The model's own system message, then instructions and tools as the developer's."""
        leading = 1 if messages and messages[0].role in ("system", "developer") else 0
        effort = self.options.reasoning_effort or "medium"
        out.control(START)
        out.text("system")
        out.control(MESSAGE)
        out.text(
            "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
            f"Current date: {self.options.today:%Y-%m-%d}\n\nReasoning: {effort}\n\n"
            "# Valid channels: analysis, commentary, final. Channel must be included for every message."
        )
        if tools:
            out.text("\nCalls to these tools must go to the commentary channel: 'functions'.")
        out.control(END)
        instructions = require_text(messages[0], 0) if leading else ""
        if instructions or tools:
            self._write_developer(out, instructions, harmony_declarations(tools) if tools else "")
        return leading

    def _write_developer(self, out: Writer, instructions: str, tools: str) -> None:
        out.control(START)
        out.text("developer")
        out.control(MESSAGE)
        if instructions:
            out.text("# Instructions\n\n")
            out.content(instructions)
            out.text("\n\n")
        if tools:
            out.text("# Tools\n\n")
            out.content(tools)
        out.control(END)

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One message, or the several of an assistant turn."""
        message = messages[index]
        if message.role == "assistant":
            self._write_assistant(out, message)
        elif message.role == "tool":
            out.control(START)
            out.content(f"functions.{_tool_name(messages, index)}")
            out.text(" to=assistant")
            out.control(CHANNEL)
            out.text("commentary")
            out.control(MESSAGE)
            out.content(to_json(require_text(message, index)))
            out.control(END)
        elif message.role == "user":
            out.control(START)
            out.text("user")
            out.control(MESSAGE)
            out.content(require_text(message, index))
            out.control(END)
        else:
            self._write_developer(out, require_text(message, index), "")

    def _write_assistant(self, out: Writer, message: Message) -> None:
        if message.reasoning_content:
            self._write_piece(out, "", "analysis", message.reasoning_content, END)
        if message.tool_calls:
            if message.content:
                self._write_piece(out, "", "commentary", message.content, END)
            for call in message.tool_calls:
                arguments = normalised_arguments(call.function.arguments)
                self._write_piece(out, f" to=functions.{call.function.name}", "commentary json", arguments, CALL)
        else:
            self._write_piece(out, "", "final", message.content or "", RETURN)

    def _write_piece(self, out: Writer, recipient: str, channel: str, text: str, end: str) -> None:
        out.control(START)
        out.text("assistant")
        out.content(recipient)
        out.control(CHANNEL)
        out.text(channel)
        out.control(MESSAGE)
        out.content(text)
        out.control(end)

    def write_close(self, out: Writer, turn: Message, following: Message | None) -> None:
        """The end of the last piece, unless it was sampled."""
        out.control(CALL if turn.tool_calls else RETURN)

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the assistant's next message."""
        out.control(START)
        out.text("assistant")


def _tool_name(messages: Sequence[Message], index: int) -> str:
    """The tool whose result this is: by the id of its call, else by its own name, else the last call."""
    message = messages[index]
    for earlier in reversed(messages[:index]):
        if earlier.role == "assistant":
            for call in earlier.tool_calls:
                if call.id == message.tool_call_id:
                    return call.function.name
            if message.name:
                return message.name
            if earlier.tool_calls:
                return earlier.tool_calls[-1].function.name
            break
    if message.name:
        return message.name
    raise RenderError(f"messages[{index}]: a tool result needs a call before it, or the name of its tool")
