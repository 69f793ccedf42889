"""DeepSeek V3.2 and V4: full-width control tokens, calls in DSML, an end-of-sentence token behind each turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, InvokeCalls, TaggedSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.families import deepseek_texts as texts
from miles_rollout.renderers.jsontext import call_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
DSML = "｜DSML｜"


class DeepSeekRenderer(DialectRenderer):
    """What V3.2 and V4 share.

    The published encoders close the reasoning of earlier turns when a new question comes; here every turn keeps it.
    """

    deviation: ClassVar[str] = "keeps earlier reasoning"
    end: ClassVar[str] = EOS
    required: ClassVar[tuple[str, ...]] = (BOS, USER, ASSISTANT)
    structural: ClassVar[frozenset[str]] = frozenset({BOS, EOS, USER, ASSISTANT})
    block: ClassVar[str]  # name of the block of calls

    @property
    def thinks(self) -> bool:
        """True unless thinking is off."""
        return self.options.thinking is not False

    @property
    def think(self) -> str:
        """What opens a turn: reasoning, or its end when there is to be none."""
        return "<think>" if self.thinks else "</think>"

    def turn_syntax(self) -> CompletionSyntax:
        """A turn begins inside its reasoning, unless thinking is off."""
        calls = InvokeCalls(block=DSML + self.block, prefix=DSML)
        return TaggedSyntax(opening="<think>", begins_inside=self.thinks, calls=calls, strip="")

    def write_tools(self, out: Writer, template: str, tools: Tools) -> None:
        """The description of the tools, behind the first system text."""
        before, after = template.split(texts.SCHEMAS)
        out.text("\n\n" + before)
        out.content("\n".join(to_json(tool.get("function", tool)) for tool in tools))
        out.text(after)

    def write_turn(self, out: Writer, message: Message) -> None:
        """Reasoning, answer and calls of an assistant turn, behind its opening `think`."""
        reasoning, content = split_reasoning(message)
        if self.thinks:
            out.content(reasoning)
            out.text("</think>")
        out.content(content)
        if message.tool_calls:
            out.text(f"\n\n<{DSML}{self.block}>\n")
            for index, call in enumerate(message.tool_calls):
                out.text("\n" if index else "")
                out.text(f"<{DSML}invoke")
                out.content(f' name="{call.function.name}">\n')
                for position, (key, value) in enumerate(call_arguments(call).items()):
                    is_text = isinstance(value, str)
                    out.text(("\n" if position else "") + f"<{DSML}parameter")
                    out.content(
                        f' name="{key}" string="{str(is_text).lower()}">' + (value if is_text else to_json(value))
                    )
                    out.text(f"</{DSML}parameter>")
                out.text(f"\n</{DSML}invoke>")
            out.text(f"\n</{DSML}{self.block}>")
        out.control(EOS)


class DeepSeekV32Renderer(DeepSeekRenderer):
    """DeepSeek V3.2: results stand in a block of text behind the turn that asked for them.

    A question or a block of results that no answer follows is closed as the published encoder closes it, with an
    empty assistant turn.
    """

    name: ClassVar[str] = "deepseek_v3_2"
    models: ClassVar[str] = "DeepSeek V3.2"
    checked: ClassVar[str] = "the published encoder (as in SGLang)"
    block: ClassVar[str] = "function_calls"

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The first token, the system text, the tools."""
        leading = 1 if messages and messages[0].role == "system" else 0
        out.control(BOS)
        if leading:
            out.content(require_text(messages[0], 0))
        if tools:
            self.write_tools(out, texts.V32_TOOLS, tools)
        return leading

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn."""
        message = messages[index]
        following = messages[index + 1].role if index + 1 < len(messages) else "assistant"
        if message.role == "system":
            out.content(require_text(message, index))
        elif message.role == "assistant":
            self._write_opening(out, messages[index - 1] if index else None, self.think)
            self.write_turn(out, message)
        elif message.role == "tool":
            if index == 0 or messages[index - 1].role != "tool":
                out.text("\n\n<function_results>")
            out.text("\n<result>")
            out.content(require_text(message, index))
            out.text("</result>")
            if following != "tool":
                out.text("\n</function_results>")
            if following not in ("tool", "assistant"):
                self._write_opening(out, message, "</think>")
        else:
            out.control(USER)
            if message.role == "developer":
                out.text("\n\n# The user's message is: ")
            out.content(require_text(message, index))
            if following != "assistant":
                self._write_opening(out, message, "</think>")

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the assistant's turn, or only that of its reasoning after tool results."""
        self._write_opening(out, previous, self.think)

    def _write_opening(self, out: Writer, previous: Message | None, think: str) -> None:
        if previous is not None and previous.role == "tool":
            out.text("\n\n")
        else:
            out.control(ASSISTANT)
        out.text(think)


class DeepSeekV4Renderer(DeepSeekRenderer):
    """DeepSeek V4: results are part of the user's turn, which takes neighbouring questions and results together."""

    name: ClassVar[str] = "deepseek_v4"
    models: ClassVar[str] = "DeepSeek V4"
    checked: ClassVar[str] = "the published encoder (as in SGLang)"
    efforts: ClassVar[tuple[str, ...]] = ("high", "max")
    block: ClassVar[str] = "tool_calls"

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The first token, what the effort asks for, the system text, the tools."""
        leading = 1 if messages and messages[0].role == "system" else 0
        out.control(BOS)
        if self.thinks and self.options.reasoning_effort == "max":
            out.text(texts.V4_MAX_EFFORT)
        if leading:
            out.content(require_text(messages[0], 0))
        if tools:
            self.write_tools(out, texts.V4_TOOLS, tools)
        return leading

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn, or one part of a user's turn."""
        message = messages[index]
        if message.role == "system":
            out.content(require_text(message, index))
        elif message.role == "assistant":
            self.write_generation_prompt(out, None)
            self.write_turn(out, message)
        elif message.role == "developer":
            out.control(USER)
            out.content(require_text(message, index))
        else:
            inside = index > 0 and messages[index - 1].role in ("user", "tool")
            if inside:
                out.text("\n\n")
            else:
                out.control(USER)
            if message.role == "tool":
                result = _in_call_order(messages, index)
                out.text("<tool_result>")
                out.content(require_text(result, index))
                out.text("</tool_result>")
            else:
                out.content(require_text(message, index))

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the assistant's turn and of its reasoning."""
        out.control(ASSISTANT)
        out.text(self.think)


def _in_call_order(messages: Sequence[Message], index: int) -> Message:
    """The result that belongs at this place: a user turn lists results in the order of the calls they answer."""
    start = end = index
    while start > 0 and messages[start - 1].role in ("user", "tool"):
        start -= 1
    while end + 1 < len(messages) and messages[end + 1].role in ("user", "tool"):
        end += 1
    calls = messages[start - 1].tool_calls if start and messages[start - 1].role == "assistant" else ()
    order = {call.id: place for place, call in enumerate(calls)}
    places = [i for i in range(start, end + 1) if messages[i].role == "tool"]
    ordered = sorted(places, key=lambda i: order.get(messages[i].tool_call_id or "", 0))
    return messages[ordered[places.index(index)]]
