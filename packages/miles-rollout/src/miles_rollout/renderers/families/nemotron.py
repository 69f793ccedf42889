"""Nemotron 3: ChatML with a system turn that is always there, tools described in XML, calls as in Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, TaggedSyntax, XmlCalls
from miles_rollout.renderers.base import require_text
from miles_rollout.renderers.families.chatml import START, ChatMLRenderer
from miles_rollout.renderers.families.qwen3 import XML_TOOLS_AFTER, XML_TOOLS_BEFORE
from miles_rollout.renderers.jsontext import call_arguments, to_json
from miles_rollout.renderers.protocol import Tools
from miles_rollout.renderers.thinking import split_reasoning
from miles_rollout.renderers.writer import Writer


class NemotronRenderer(ChatMLRenderer):
    """Nemotron 3 Nano, Super and Ultra.

    Nano and Super put a line break around the end of the reasoning, Ultra does not; the template in the folder
    decides. The switch for low effort is refused: it marks only the latest question and so rewrites history.
    """

    name: ClassVar[str] = "nemotron3"
    models: ClassVar[str] = "Nemotron 3 Nano, Super, Ultra"
    checked: ClassVar[str] = "the published templates (as in trl)"
    thinking_choices: ClassVar[tuple[bool, ...]] = (True, False)
    deviation: ClassVar[str] = "keeps earlier reasoning"
    stop: ClassVar[tuple[str, ...]] = ()

    def turn_syntax(self) -> CompletionSyntax:
        """A turn begins inside its reasoning, unless thinking is off."""
        return TaggedSyntax(begins_inside=self.options.thinking is not False, calls=XmlCalls())

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """The system turn: system text, then the tools."""
        leading = 1 if messages and messages[0].role in ("system", "developer") else 0
        system = require_text(messages[0], 0) if leading else ""
        out.control(START)
        out.text("system\n")
        out.content(system)
        if tools:
            out.text(("\n\n" if system else "") + XML_TOOLS_BEFORE)
            for tool in tools:
                out.content(_describe(tool.get("function", tool)))
            out.text(XML_TOOLS_AFTER)
        out.control(self.end)
        out.text(self.glue)
        return leading

    def write_assistant(self, out: Writer, message: Message) -> None:
        """Reasoning, answer, calls."""
        reasoning, content = split_reasoning(message)
        line = "" if '~ message.reasoning_content ~ "</think>"' in (self.folder.chat_template or "") else "\n"
        if reasoning.strip():
            out.text("<think>\n")
            out.content(reasoning)
            out.text(f"{line}</think>")
            out.content((line + content).rstrip())
        else:
            out.text("<think></think>")
            out.content(content.rstrip())
        if message.tool_calls:
            out.text("\n")
        for call in message.tool_calls:
            out.text("<tool_call>\n")
            out.content(f"<function={call.function.name}>\n")
            for key, value in call_arguments(call).items():
                text = to_json(value) if isinstance(value, (dict, list)) else str(value)
                out.content(f"<parameter={key}>\n{text}\n</parameter>\n")
            out.text("</function>\n</tool_call>\n")

    def write_tool_result(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """A result between tags, inside a user turn that a run of results shares."""
        if index == 0 or messages[index - 1].role != "tool":
            out.control(START)
            out.text("user\n")
        out.text("<tool_response>\n")
        out.content(require_text(messages[index], index))
        out.text("\n</tool_response>\n")
        if index + 1 == len(messages) or messages[index + 1].role != "tool":
            out.control(self.end)
            out.text(self.glue)

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """The header and the opening of the reasoning, or its empty block when thinking is off."""
        super().write_generation_prompt(out, previous)
        out.text("<think></think>" if self.options.thinking is False else "<think>\n")


def _describe(function: Mapping[str, Any]) -> str:
    """A tool in the XML that these models read."""
    out = [f"\n<function>\n<name>{function.get('name')}</name>"]
    if "description" in function:
        out.append(f"\n<description>{str(function['description']).strip()}</description>")
    out.append("\n<parameters>")
    parameters = function.get("parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    properties = parameters.get("properties")
    for key, schema in properties.items() if isinstance(properties, Mapping) else ():
        out.append(f"\n<parameter>\n<name>{key}</name>")
        if "type" in schema:
            out.append(f"\n<type>{schema['type']}</type>")
        if "description" in schema:
            out.append(f"\n<description>{str(schema['description']).strip()}</description>")
        if "enum" in schema:
            out.append(f"\n<enum>{to_json(schema['enum'])}</enum>")
        out.append(_other_keys(schema, {"name", "type", "description", "enum"}) + "\n</parameter>")
    out.append(_other_keys(parameters, {"type", "properties", "required"}))
    if "required" in parameters:
        out.append(f"\n<required>{to_json(parameters['required'])}</required>")
    out.append("\n</parameters>" + _other_keys(function, {"type", "name", "description", "parameters"}))
    return "".join(out) + "\n</function>"


def _other_keys(schema: Mapping[str, Any], known: set[str]) -> str:
    return "".join(
        f"\n<{key}>{to_json(value) if isinstance(value, (dict, list)) else value}</{key}>"
        for key, value in schema.items()
        if key not in known
    )
