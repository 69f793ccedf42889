"""Message matching says whether a replayed message is the stored one, and which repairs make it so.

All messages that get here are normalised (`messages.parse_messages`): an empty value has one spelling, the
index of a tool call and unknown keys are gone. So *strict* equality is plain equality.

A matcher decides for every message. A repair is looked for only where the matcher says no and the stored
message is the policy's own: the harness's copy of it may have lost what a harness cannot have meant to change.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

import msgspec

from miles_contracts import InvalidFieldError, Message, MessageMatcher, ToolCall
from miles_rollout.session.errors import MatcherError


class Repair(StrEnum):
    """How a harness's copy of the policy's own message differs without meaning it."""

    REASONING_OMITTED = "reasoning_omitted"
    """The reasoning text is missing."""
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    """Tool-call arguments are the same JSON value in another spelling."""
    WHITESPACE_EDGES = "whitespace_edges"
    """Content or reasoning lost or gained whitespace at its ends."""
    TOOL_CALL_IDS_REWRITTEN = "tool_call_ids_rewritten"
    """Ids of tool calls were replaced one for one, in the calls and in their results alike."""


ALL_REPAIRS: Final = frozenset(Repair)


class Reconciled(msgspec.Struct, frozen=True):
    """A replayed message counts as the stored one.

    Attributes:
        repairs: what had to be overlooked; empty for an exact match.
        id_map: replayed tool-call id -> stored id, only the rewritten ones.
    """

    repairs: frozenset[Repair] = frozenset()
    id_map: dict[str, str] = {}


class Difference(msgspec.Struct, frozen=True):
    """The first field in which a replayed message really differs."""

    field: str
    stored: Any
    replayed: Any


EXACT: Final = Reconciled()


def strict(stored: Message, replayed: Message) -> bool:
    """Every field is equal."""
    return stored == replayed


def loose_tool_call(stored: Message, replayed: Message) -> bool:
    """Strict, but tool-call arguments may be spelled differently as long as they are the same JSON value."""
    if stored == replayed:
        return True
    if len(stored.tool_calls) != len(replayed.tool_calls):
        return False
    if msgspec.structs.replace(stored, tool_calls=()) != msgspec.structs.replace(replayed, tool_calls=()):
        return False
    return all(
        (a.id, a.type, a.function.name) == (b.id, b.type, b.function.name)
        and same_arguments(a.function.arguments, b.function.arguments)
        for a, b in zip(stored.tool_calls, replayed.tool_calls, strict=True)
    )


def role_content_only(stored: Message, replayed: Message) -> bool:
    """Role and content are equal. Risky: histories that differ in reasoning or tool calls are taken for one."""
    return stored.role == replayed.role and stored.content == replayed.content


MATCHERS: Final[dict[str, MessageMatcher]] = {
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def load_matcher(spec: str) -> MessageMatcher:
    """A matcher by name, or a user's own by import path `package.module:function`.

    A user's matcher must return a bool; anything else, or an exception, is a `MatcherError` of that request.

    Raises:
        InvalidFieldError: no such name, module or function.
    """
    if spec in MATCHERS:
        return MATCHERS[spec]
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise InvalidFieldError("matcher", spec, f"use one of {', '.join(MATCHERS)} or package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidFieldError("matcher", spec, f"cannot be imported: {error}") from error
    if not callable(function):
        raise InvalidFieldError("matcher", spec, "name a function (stored, replayed) -> bool")
    return _guarded(spec, function)


def _guarded(spec: str, function: Callable[[Message, Message], Any]) -> MessageMatcher:
    def matcher(stored: Message, replayed: Message) -> bool:
        try:
            answer = function(stored, replayed)
        except Exception as error:  # the user's code is a request boundary of its own
            raise MatcherError(f"matcher {spec} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise MatcherError(f"matcher {spec} returned {answer!r}; it must return True or False")
        return answer

    return matcher


def reconcile(
    stored: Message, replayed: Message, matcher: MessageMatcher, *, allowed: frozenset[Repair], own: bool
) -> Reconciled | Difference:
    """Compare one replayed message with the stored one.

    Args:
        stored: what the server gave the client (or got from it earlier).
        replayed: the client's copy.
        matcher: decides equality.
        allowed: repairs that may be made.
        own: the policy sampled `stored`; nobody else's messages are repaired.
    """
    if matcher(stored, replayed):
        return EXACT
    if not own:
        return first_difference(stored, replayed)
    return _repair(stored, replayed, allowed)


def _repair(stored: Message, replayed: Message, allowed: frozenset[Repair]) -> Reconciled | Difference:
    if stored.role != replayed.role:
        return Difference("role", stored.role, replayed.role)
    used: set[Repair] = set()
    if stored.content != replayed.content:
        if not _same_but_edges(stored.content, replayed.content):
            return Difference("content", stored.content, replayed.content)
        used.add(Repair.WHITESPACE_EDGES)
    if stored.reasoning_content != replayed.reasoning_content:
        if _same_but_edges(stored.reasoning_content, replayed.reasoning_content):
            used.add(Repair.WHITESPACE_EDGES)
        elif replayed.reasoning_content is None:
            used.add(Repair.REASONING_OMITTED)
        else:
            return Difference("reasoning_content", stored.reasoning_content, replayed.reasoning_content)
    id_map: dict[str, str] = {}
    difference = _repair_calls(stored.tool_calls, replayed.tool_calls, used, id_map)
    if difference is not None:
        return difference
    if stored.tool_call_id != replayed.tool_call_id or stored.name != replayed.name:
        return first_difference(stored, replayed)
    return Reconciled(frozenset(used), id_map) if used <= allowed else first_difference(stored, replayed)


def _repair_calls(
    stored: tuple[ToolCall, ...], replayed: tuple[ToolCall, ...], used: set[Repair], id_map: dict[str, str]
) -> Difference | None:
    if len(stored) != len(replayed):
        return Difference("tool_calls", len(stored), len(replayed))
    for i, (a, b) in enumerate(zip(stored, replayed, strict=True)):
        where = f"tool_calls[{i}]"
        if a.type != b.type:
            return Difference(f"{where}.type", a.type, b.type)
        if a.function.name != b.function.name:
            return Difference(f"{where}.function.name", a.function.name, b.function.name)
        if a.function.arguments != b.function.arguments:
            if not same_arguments(a.function.arguments, b.function.arguments):
                return Difference(f"{where}.function.arguments", a.function.arguments, b.function.arguments)
            used.add(Repair.ARGUMENTS_RESERIALISED)
    rewritten = {b.id: a.id for a, b in zip(stored, replayed, strict=True)}
    if any(new != old for new, old in rewritten.items()):
        # Two calls with one new id could not be told apart by their results: that is no consistent renaming.
        if len(rewritten) != len(stored):
            clash = next(i for i, b in enumerate(replayed) if rewritten[b.id] != stored[i].id)
            return Difference(f"tool_calls[{clash}].id", stored[clash].id, replayed[clash].id)
        used.add(Repair.TOOL_CALL_IDS_REWRITTEN)
        id_map.update({new: old for new, old in rewritten.items() if new != old})
    return None


def first_difference(stored: Message, replayed: Message) -> Difference:
    """The first field, in reading order, in which two messages differ; `matcher` when only a matcher says so."""
    for field in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"):
        a, b = getattr(stored, field), getattr(replayed, field)
        if a == b:
            continue
        if field == "tool_calls" and len(a) == len(b):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                if x.id != y.id:
                    return Difference(f"tool_calls[{i}].id", x.id, y.id)
                if x.function != y.function:
                    part = "name" if x.function.name != y.function.name else "arguments"
                    return Difference(
                        f"tool_calls[{i}].function.{part}", getattr(x.function, part), getattr(y.function, part)
                    )
        return Difference(field, a, b)
    return Difference("matcher", True, False)


def _same_but_edges(a: str | None, b: str | None) -> bool:
    return (a or "").strip() == (b or "").strip()


def same_arguments(a: str, b: str) -> bool:
    """True when two texts are the same JSON object: key order and number spelling free, 1 == 1.0, true != 1.

    Text that is no JSON object (duplicate keys, NaN, malformed) is the same only when it is equal.
    """
    if a == b:
        return True
    try:
        return bool(_canonical(a) == _canonical(b))
    except (ValueError, RecursionError):
        return False


def _canonical(text: str) -> Any:
    # The standard library's reader, because msgspec's keeps the last of two equal keys silently.
    if not text.strip():
        return ("object", ())

    def pairs(items: list[tuple[str, Any]]) -> Any:
        keys = [k for k, _ in items]
        if len(set(keys)) != len(keys):
            raise ValueError("duplicate key")
        return ("object", tuple(sorted((k, _tag(v)) for k, v in items)))

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(text, object_pairs_hook=pairs, parse_float=Decimal, parse_int=Decimal, parse_constant=refuse)
    if not (isinstance(value, tuple) and value[0] == "object"):
        raise ValueError("not an object")
    return value


def _tag(value: Any) -> Any:
    """Make values comparable without Python's True == 1."""
    if isinstance(value, bool):
        return ("bool", str(value))
    if isinstance(value, Decimal):
        return ("number", value)
    if isinstance(value, str):
        return ("string", value)
    if value is None:
        return ("null", "")
    if isinstance(value, list):
        return ("array", tuple(_tag(v) for v in value))
    return value
