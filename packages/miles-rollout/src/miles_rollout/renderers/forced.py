"""The opening of a call that a client forces: ids in front of what is sampled, exactly those of a rendered call.

Nothing is masked: the ids are part of the prompt, and the policy samples what follows them. Which ids may be written
is found by rendering assistant turns, without reasoning or text, that contain calls as different from each other as
the choice allows. What those renderings have in common is fixed by the family's form. Of that, a last token that
touches the first free character is left to the policy, unless nothing merges with it: a tokenizer could join the two.
So the opening stays a prefix of the rendered call whatever is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_contracts import FunctionCall, Message, ToolCall
from miles_rollout.renderers.errors import CallOpeningError
from miles_rollout.renderers.vocabulary import Vocabulary

RenderTurn = Callable[[Message], list[int]]
"""Ids that follow the history when an assistant message ends the conversation."""
_KEYS = ("a", "Z", "_", "0", "-", ".", "$", "é", "大", " ", '"', "<", "in", "the")
"""First characters of an argument's name: of every class that tokenizers tell apart."""
_NAMES = ("a", "Z", "_", "0")
_PLAIN = ("x", " y")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCall:
    """The new part of a prompt whose last ids open a call.

    Attributes:
        ids: everything behind the history, the opening included.
        opening: the last of `ids`: what belongs to the assistant's turn and was not sampled.
    """

    ids: list[int]
    opening: list[int]


def force_call(
    render: RenderTurn, vocabulary: Vocabulary, tools: Sequence[Mapping[str, Any]], name: str | None
) -> ForcedCall:
    """The longest opening that every call of the choice begins with.

    Args:
        render: writes an assistant turn behind the history.
        vocabulary: the tokenizer.
        tools: OpenAI tool objects that may be called, at least one.
        name: the tool that must be called, None for any of them.

    Raises:
        CallOpeningError: the family's calls have no beginning of their own that could be written.
    """
    functions = {str(f.get("name")): f for f in (tool.get("function", tool) for tool in tools)}
    if name is None and len(functions) == 1:
        name = next(iter(functions))
    calls = [render(_turn(*probe)) for probe in _probes(functions, name)]
    plain = [render(Message(role="assistant", content=text)) for text in _PLAIN]
    ids = _common(calls)
    begin = max(_shared(ids, other) for other in plain)
    texts = [vocabulary.decode(call[begin:]) for call in calls]
    fixed = min(_shared(texts[0], text) for text in texts)
    while len(ids) > begin and not vocabulary.is_added(ids[-1]) and len(vocabulary.decode(ids[begin:])) >= fixed:
        ids.pop()
    if begin == len(ids):
        raise CallOpeningError("its calls begin as its answers do, so that no text says that a call follows")
    opening = ids[begin:]
    if name is not None:
        if name not in vocabulary.decode(opening):
            raise CallOpeningError(f"the tokenizer merges the end of the name {name!r} with what follows it")
        others = (render(_turn(other, {"a": "x"}, 0)) for other in functions if other != name)
        if any(_shared(ids, other) == len(ids) for other in others):
            raise CallOpeningError(f"the name of another tool begins with {name!r}, and nothing marks its end")
    return ForcedCall(ids=ids, opening=opening)


def _probes(functions: Mapping[str, Mapping[str, Any]], name: str | None) -> list[tuple[str, dict[str, Any], int]]:
    """Calls that differ in everything that is not fixed: name (for any tool), arguments, number of the call."""
    if name is None:
        return [(other, {"a": "x"}, 0) for other in (*functions, *_NAMES)]
    probes: list[tuple[str, dict[str, Any], int]] = [
        (name, {key: value}, number)
        for number, key in enumerate(_KEYS)
        for value in (("x", 1) if number == 0 else ("x",))
    ]
    if not _needs_arguments(functions.get(name, {})):
        probes.append((name, {}, 1))
    return probes


def _needs_arguments(function: Mapping[str, Any]) -> bool:
    """True when a call without arguments would be wrong, so that an argument's beginning is fixed too."""
    parameters = function.get("parameters")
    return isinstance(parameters, Mapping) and bool(parameters.get("required"))


def _turn(name: str, arguments: dict[str, Any], number: int) -> Message:
    function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    # The form of ids that Kimi models write themselves; other families do not show ids of calls.
    return Message(
        role="assistant", content="", tool_calls=(ToolCall(id=f"functions.{name}:{number}", function=function),)
    )


def _common(sequences: Sequence[list[int]]) -> list[int]:
    first = sequences[0]
    return first[: min(_shared(first, other) for other in sequences)]


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
