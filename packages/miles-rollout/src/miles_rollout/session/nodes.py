"""A node is one generation: the tokens that were new in it, and nothing that an ancestor already holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import Message, VersionSpan
from miles_rollout.session.matching import Repair
from miles_rollout.token_ids import TokenIds, ids_crc, json_items

Tools = tuple[dict[str, Any], ...]


class Generation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine sampled, checked. N is the number of sampled tokens.

    Attributes:
        output_ids: int32 [N].
        logprobs: float32 [N], nats, finite and <= 0.
        version_spans: cover [0, N) exactly; positions count from the first sampled token.
        finish_reason: `stop` or `length`.
        truncated: a length limit ended it; decided from token counts.
        cached_tokens: prompt tokens found in the engine's prefix cache, None when not said.
        routing: expert ids [rows, layers, top_k] of the tokens that were fed for the first time, from the last
            stored one (which was sampled, but not fed before) to the last but one; None when not recorded.
        request_id: the engine's name for the request.
    """

    output_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    truncated: bool
    request_id: str
    cached_tokens: int | None = None
    routing: NDArray[Any] | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One committed generation of a session.

    Attributes:
        seq: order of commit in the session, from 0.
        begun: how many commits the session had when the request was accepted.
        parent: the generation this one continues, None for a first turn.
        messages: what the client appended since the parent's reply (tool-call ids in the stored spelling).
        reply: the assistant message as the client got it; None for a token-level completion.
        prompt_ids: int32 [P], tokens of `messages` with the glue before and the generation prompt after them.
        sampled: what the engine sampled.
        routing: rows of the tokens that were fed for the first time here, from `start - 1` (0 for a first turn).
        start: position of the first token of `prompt_ids` in the whole sequence.
        num_messages: messages of the whole path, this reply included.
        tools: the tools the path's first prompt was rendered with.
        id_map: rewritten tool-call id -> stored id, for all messages up to and including `messages`.
        repairs: kinds of repair that matching this reply has needed.
        demoted: assistant messages in `messages`, which the policy may have sampled once but did not here.
        opening: how many of the last `prompt_ids` open a forced call; the reply begins with them.
        retried: the client asked again for this turn after it was answered.
        crc: CRC-32 of all ids up to the end of this node, None until somebody continues the turn.
        items: `prompt_ids` and the sampled ids as elements of a JSON array; empty until then.
    """

    seq: int
    begun: int
    parent: Node | None
    messages: tuple[Message, ...]
    reply: Message | None
    prompt_ids: NDArray[np.int32]
    sampled: Generation
    routing: NDArray[Any] | None
    start: int
    num_messages: int
    tools: Tools
    id_map: dict[str, str]
    repairs: set[Repair] = field(default_factory=set)
    children: list[Node] = field(default_factory=list)
    demoted: int = 0
    retried: bool = False
    opening: int = 0
    crc: int | None = None
    items: bytes = b""

    @property
    def sampled_start(self) -> int:
        """Position of the first sampled token."""
        return self.start + len(self.prompt_ids)

    @property
    def end(self) -> int:
        """Length of the whole sequence up to and including this node."""
        return self.sampled_start + len(self.sampled.output_ids)

    def path(self) -> list[Node]:
        """Nodes from the first turn to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def path_ids(path: Sequence[Node]) -> NDArray[np.int32]:
    """int32 [T], the whole sequence of a path; the engine saw exactly these ids in this order."""
    if not path:
        return np.empty(0, dtype=np.int32)
    parts = []
    for node in path:
        parts.append(node.prompt_ids)
        parts.append(node.sampled.output_ids)
    return np.concatenate(parts)


def path_prompt(node: Node | None) -> TokenIds:
    """The whole sequence up to and including a node, as what an engine is given; no ids without a node.

    What is derived from the ids of a node is kept with it: a turn computes that of its own ids only.
    """
    if node is None:
        return TokenIds()
    path = node.path()
    pieces: list[NDArray[np.int32]] = []
    for each in path:
        parts = (each.prompt_ids, each.sampled.output_ids)
        if each.crc is None:
            before = each.parent.crc if each.parent is not None else 0
            assert before is not None  # a path begins at its root
            each.crc = ids_crc(parts[1], ids_crc(parts[0], before))
            each.items = json_items(np.concatenate(parts))
        pieces += parts
    return TokenIds(pieces, [each.items for each in path], node.crc or 0, node.end)


class PathMessages(Sequence[Message]):
    """Messages up to and including a node's reply, as they were rendered and sampled; the last one costs nothing.

    Args:
        node: where they end; None for no messages.
    """

    def __init__(self, node: Node | None) -> None:
        self._node = node

    def __len__(self) -> int:
        return self._node.num_messages if self._node is not None else 0

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        node = self._node
        if at == -1 and node is not None and node.reply is not None:
            return node.reply
        return path_messages(node.path() if node is not None else ())[at]

    def __iter__(self) -> Iterator[Message]:
        return iter(path_messages(self._node.path() if self._node is not None else ()))


def path_messages(path: Sequence[Node]) -> list[Message]:
    """Messages of a path as they were rendered and sampled."""
    messages: list[Message] = []
    for node in path:
        messages.extend(node.messages)
        if node.reply is not None:
            messages.append(node.reply)
    return messages
