"""MiniMax M2, M2.1, M2.5, M2.7: bracket tokens around turns, calls as `invoke` elements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, InvokeCalls, TaggedSyntax
from miles_rollout.renderers.base import DialectRenderer, require_text
from miles_rollout.renderers.errors import RenderError
from miles_rollout.renderers.jsontext import call_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer

BOS, ROLE, END = "]~!b[", "]~b]", "[e~["
CALL = "minimax:tool_call"

TOOLS_BEFORE = (
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n"
)
TOOLS_AFTER = (
    "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n"
    f'<{CALL}>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    f'<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</{CALL}>'
)
_IDENTITY = re.compile(r'model_identity = "([^"]*)"')


class MiniMaxRenderer(DialectRenderer):
    """The M2 models. Without a system message the model states its own name, which the template in the folder knows."""

    name: ClassVar[str] = "minimax_m2"
    models: ClassVar[str] = "MiniMax M2, M2.1, M2.5, M2.7"
    checked: ClassVar[str] = "another implementation (renderers)"
    thinking_choices: ClassVar[tuple[bool, ...]] = (True,)
    deviation: ClassVar[str] = "keeps earlier reasoning; system message only at the start; always thinks"
    end: ClassVar[str] = END
    glue: ClassVar[str] = "\n"
    required: ClassVar[tuple[str, ...]] = (BOS, ROLE)
    structural: ClassVar[frozenset[str]] = frozenset({BOS, ROLE, END})

    def turn_syntax(self) -> CompletionSyntax:
        """A turn begins inside its reasoning."""
        return TaggedSyntax(begins_inside=True, calls=InvokeCalls(block=CALL))

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The system turn, which is always there."""
        leading = 1 if messages and messages[0].role in ("system", "developer") else 0
        out.control(BOS)
        out.control(ROLE)
        out.text("system\n")
        if leading and messages[0].content:
            out.content(messages[0].content)
        else:
            identity = _IDENTITY.search(self.folder.chat_template or "")
            out.text(identity.group(1) if identity else "You are a helpful assistant.")
        if tools:
            out.text(TOOLS_BEFORE)
            for tool in tools:
                out.text("<tool>")
                out.content(to_json(tool.get("function", tool)))
                out.text("</tool>\n")
            out.text(TOOLS_AFTER)
        out.control(END)
        out.text(self.glue)
        return leading

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """One turn; neighbouring tool results share one."""
        message = messages[index]
        if message.role == "tool":
            if index == 0 or messages[index - 1].role != "tool":
                out.control(ROLE)
                out.text("tool")
            out.text("\n<response>")
            out.content(require_text(message, index))
            out.text("</response>")
            if index + 1 < len(messages) and messages[index + 1].role == "tool":
                return
        elif message.role == "user":
            out.control(ROLE)
            out.text("user\n")
            out.content(require_text(message, index))
        elif message.role == "assistant":
            out.control(ROLE)
            out.text("ai\n")
            self._write_assistant(out, message)
        else:
            raise RenderError(
                f"messages[{index}].role: {self.name} takes a system message only at the start; send it as the user's"
            )
        out.control(END)
        out.text(self.glue)

    def _write_assistant(self, out: Writer, message: Message) -> None:
        reasoning, content = split_reasoning(message)
        if reasoning:
            out.text("<think>\n")
            out.content(reasoning)
            out.text("\n</think>\n\n")
        out.content(content)
        if message.tool_calls:
            out.text(f"\n<{CALL}>\n")
            for call in message.tool_calls:
                out.content(f'<invoke name="{call.function.name}">\n')
                for key, value in call_arguments(call).items():
                    text = value if isinstance(value, str) else to_json(value)
                    out.content(f'<parameter name="{key}">{text}</parameter>\n')
                out.text("</invoke>\n")
            out.text(f"</{CALL}>")

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The opening of the turn and of its reasoning."""
        out.control(ROLE)
        out.text("ai\n<think>\n")
