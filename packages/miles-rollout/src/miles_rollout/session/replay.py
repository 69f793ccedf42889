"""Replay: walk a request's messages along stored turns, noting repairs and rewritten ids, until one differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from miles_contracts import Message, MessageMatcher
from miles_rollout.session.errors import HistoryDivergedError
from miles_rollout.session.matching import Difference, Repair, reconcile
from miles_rollout.session.messages import shorten
from miles_rollout.session.nodes import Node


class Trail:
    """What matching has found so far along one path."""

    __slots__ = ("id_map", "index", "repairs")

    def __init__(self, index: int, id_map: dict[str, str], repairs: tuple[tuple[Node, frozenset[Repair]], ...]) -> None:
        self.index = index
        self.id_map = id_map
        self.repairs = repairs


class Miss(msgspec.Struct, frozen=True):
    """Where a node stopped matching.

    Attributes:
        index: position in the request, of the message that differs or is missing.
        difference: None when the request ends before the node does.
        in_reply: the node's own messages matched, its reply did not.
    """

    index: int
    difference: Difference | None
    in_reply: bool


START: Final = Trail(0, {}, ())


class Replay:
    """Compares requests with nodes.

    Args:
        matcher: decides whether a replayed message is the stored one.
        repairs: what may be overlooked in copies of the policy's own messages.
    """

    def __init__(self, matcher: MessageMatcher, repairs: frozenset[Repair]) -> None:
        self._matcher = matcher
        self._repairs = repairs

    def match(self, node: Node, messages: Sequence[Message], trail: Trail) -> Miss | None:
        """Advance `trail` over the node's messages and reply; on a miss `trail` is of no further use."""
        for stored in node.messages:
            if trail.index >= len(messages):
                return Miss(trail.index, None, False)
            replayed = with_stored_id(messages[trail.index], trail.id_map)
            found = reconcile(stored, replayed, self._matcher, allowed=self._repairs, own=False)
            if isinstance(found, Difference):
                return Miss(trail.index, found, False)
            trail.index += 1
        return self.match_reply(node, messages, trail)

    def match_reply(self, node: Node, messages: Sequence[Message], trail: Trail) -> Miss | None:
        """Advance `trail` over the node's reply alone."""
        assert node.reply is not None
        if trail.index >= len(messages):
            return Miss(trail.index, None, True)
        found = reconcile(node.reply, messages[trail.index], self._matcher, allowed=self._repairs, own=True)
        if isinstance(found, Difference):
            return Miss(trail.index, found, True)
        if found.id_map:
            wrong = _inconsistent_result(found.id_map, messages[trail.index + 1 :])
            if wrong is not None:
                call = next(i for i, c in enumerate(node.reply.tool_calls) if c.id == wrong)
                seen = messages[trail.index].tool_calls[call].id
                return Miss(trail.index, Difference(f"tool_calls[{call}].id", wrong, seen), True)
            trail.id_map = {**trail.id_map, **found.id_map}
        if found.repairs:
            trail.repairs = (*trail.repairs, (node, found.repairs))
        trail.index += 1
        return None


def _inconsistent_result(id_map: dict[str, str], following: Sequence[Message]) -> str | None:
    """The stored id of a rewritten call whose result still uses the stored id, None when all results agree."""
    gone = set(id_map.values()) - set(id_map)
    for message in following:
        if message.role == "assistant":
            return None
        if message.role == "tool" and message.tool_call_id in gone:
            return message.tool_call_id
    return None


def with_stored_id(message: Message, id_map: dict[str, str]) -> Message:
    """The message with its call's id as it is stored."""
    if id_map and message.tool_call_id is not None and message.tool_call_id in id_map:
        return msgspec.structs.replace(message, tool_call_id=id_map[message.tool_call_id])
    return message


def diverged(node: Node, miss: Miss, messages: Sequence[Message]) -> HistoryDivergedError:
    """The refusal that names the first message and field that differ."""
    whose = "the policy's own reply" if miss.in_reply else "a message of the client"
    advice = (
        "this session is linear: send its whole history unchanged and append to it, or leave out the last reply "
        "to retry it; use a branching session for edited or compacted histories"
    )
    if miss.difference is None:
        return HistoryDivergedError(
            f"messages: the request ends after {miss.index} messages, inside the stored history (turn {node.seq}, "
            f"{whose}); {advice}",
            message_index=miss.index,
            field="role",
        )
    d = miss.difference
    return HistoryDivergedError(
        f"messages[{miss.index}].{d.field} differs from the stored history (turn {node.seq}, {whose}): "
        f"stored {shorten(d.stored)}, got {shorten(d.replayed)}; {advice}",
        message_index=miss.index,
        field=d.field,
    )
