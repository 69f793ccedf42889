"""Views of sampled text for clients: reasoning, content, tool calls. Parsing never touches tokens or loses text."""

from miles_rollout.parsers.calls import CallFormat, ParsedCalls
from miles_rollout.parsers.json_calls import JsonCalls
from miles_rollout.parsers.message import CompletionSyntax, ParsedMessage, parse_completion
from miles_rollout.parsers.tagged import TaggedSyntax
from miles_rollout.parsers.xml_calls import XmlCalls

__all__ = [
    "CallFormat",
    "CompletionSyntax",
    "JsonCalls",
    "ParsedCalls",
    "ParsedMessage",
    "TaggedSyntax",
    "XmlCalls",
    "parse_completion",
]
