"""Views of sampled text for clients: reasoning, content, tool calls. Parsing never touches tokens or loses text."""

from miles_rollout.parsers.calls import CallFormat, ParsedCalls
from miles_rollout.parsers.gemma_calls import GemmaCalls
from miles_rollout.parsers.harmony import HarmonySyntax
from miles_rollout.parsers.inkling import InklingSyntax
from miles_rollout.parsers.invoke_calls import InvokeCalls
from miles_rollout.parsers.json_calls import JsonCalls
from miles_rollout.parsers.kimi_calls import KimiCalls
from miles_rollout.parsers.message import CompletionSyntax, ParsedMessage, Progress, parse_completion, text_before
from miles_rollout.parsers.pair_calls import PairCalls
from miles_rollout.parsers.pieces import PiecedSyntax
from miles_rollout.parsers.tagged import TaggedSyntax
from miles_rollout.parsers.xml_calls import XmlCalls

__all__ = [
    "CallFormat",
    "CompletionSyntax",
    "GemmaCalls",
    "HarmonySyntax",
    "InklingSyntax",
    "InvokeCalls",
    "JsonCalls",
    "KimiCalls",
    "PairCalls",
    "ParsedCalls",
    "ParsedMessage",
    "PiecedSyntax",
    "Progress",
    "TaggedSyntax",
    "XmlCalls",
    "parse_completion",
    "text_before",
]
