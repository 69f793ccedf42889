"""Gemma 4: turns between `<|turn>` and `<turn|>`; calls and their results are parts of one model turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, GemmaCalls, TaggedSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.families.gemma4_schema import declaration, literal
from miles_rollout.renderers.jsontext import call_arguments
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.writer import Writer

TURN, END, QUOTE = "<|turn>", "<turn|>", '<|"|>'
RESPONSE, END_RESPONSE = "<|tool_response>", "<tool_response|>"
THOUGHT, END_THOUGHT = "<|channel>thought\n", "<channel|>"


class Gemma4Renderer(DialectRenderer):
    """Gemma 4 Instruct. Thinking is off unless asked for.

    After a call the model stops with `<|tool_response>`, the token that opens the result; it is kept. The published
    template writes the text of a turn behind its calls and their results; here it stays where it was sampled, before
    the calls.
    """

    name: ClassVar[str] = "gemma4"
    models: ClassVar[str] = "Gemma 4"
    checked: ClassVar[str] = "the published template (as in trl)"
    deviation: ClassVar[str] = "keeps earlier reasoning; text before calls stays there"
    end: ClassVar[str] = END
    glue: ClassVar[str] = "\n"
    stop: ClassVar[tuple[str, ...]] = (RESPONSE,)
    required: ClassVar[tuple[str, ...]] = ("<bos>", TURN, QUOTE, END_RESPONSE, "<|tool_call>", "<tool_call|>")
    structural: ClassVar[frozenset[str]] = frozenset(
        {
            "<bos>",
            "<eos>",
            TURN,
            END,
            QUOTE,
            RESPONSE,
            END_RESPONSE,
            "<|tool_call>",
            "<tool_call|>",
            "<|tool>",
            "<tool|>",
        }
        | {"<|channel>", "<channel|>", "<|think|>"}
    )

    def turn_syntax(self) -> CompletionSyntax:
        """Reasoning in a channel; calls between control tokens."""
        return TaggedSyntax(opening=THOUGHT, closing=END_THOUGHT, calls=GemmaCalls())

    @property
    def thinks(self) -> bool:
        """True when thinking was asked for."""
        return self.options.thinking is True

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The first token, and a system turn with the switch for thinking, the system text and the tools."""
        leading = 1 if messages and messages[0].role in ("system", "developer") else 0
        out.control("<bos>")
        if not (self.thinks or tools or leading):
            return 0
        out.control(TURN)
        out.text("system\n" + ("<|think|>\n" if self.thinks else ""))
        if leading:
            out.content(require_text(messages[0], 0).strip())
        for tool in tools:
            out.text("<|tool>")
            out.text(declaration(tool))
            out.text("<tool|>")
        out.control(END)
        out.text(self.glue)
        return leading

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn, or one part of a model turn."""
        message = messages[index]
        following = messages[index + 1].role if index + 1 < len(messages) else None
        if message.role == "tool":
            self._write_result(out, messages, index)
            if following in (None, "tool", "assistant"):
                return
        elif message.role == "assistant":
            if not self._continues(messages, index):
                out.control(TURN)
                out.text("model\n")
            self._write_assistant(out, message)
            if message.tool_calls and following in (None, "tool"):
                return
        else:
            out.control(TURN)
            out.text("user\n" if message.role == "user" else "system\n")
            out.content(require_text(message, index).strip())
        out.control(END)
        out.text(self.glue)

    def _continues(self, messages: Sequence[Message], index: int) -> bool:
        return index > 0 and messages[index - 1].role == "tool"

    def _write_assistant(self, out: Writer, message: Message) -> None:
        if message.reasoning_content:
            out.text(THOUGHT)
            out.content(message.reasoning_content)
            out.text("\n" + END_THOUGHT)
        out.content((message.content or "").strip())
        for call in message.tool_calls:
            out.text("<|tool_call>call:")
            out.content(call.function.name)
            out.text(literal(call_arguments(call)))
            out.text("<tool_call|>")

    def _write_result(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        out.control(RESPONSE)
        out.text("response:")
        out.content(_tool_name(messages, index))
        out.text("{value:" + QUOTE)
        out.content(require_text(messages[index], index))
        out.text(QUOTE + "}" + END_RESPONSE)

    def write_close(self, out: Writer, turn: Message, following: Message | None) -> None:
        """The end of the turn; behind calls that is up to what follows."""
        if not turn.tool_calls or (following is not None and following.role != "tool"):
            super().write_close(out, turn, following)

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of a model turn; after a result the turn is open already and only reasoning is opened."""
        if previous is not None and previous.role == "tool":
            out.text(THOUGHT if self.thinks else "")
            return
        if previous is not None and previous.tool_calls:  # calls without results: the turn is still open
            out.control(END)
            out.text(self.glue)
        out.control(TURN)
        out.text("model\n")


def _tool_name(messages: Sequence[Message], index: int) -> str:
    """Name of the tool that answers: that of the call with its id, else its own."""
    message = messages[index]
    for earlier in reversed(messages[:index]):
        for call in earlier.tool_calls:
            if call.id == message.tool_call_id:
                return call.function.name
        if earlier.role == "assistant":
            break
    return message.name or "unknown"
