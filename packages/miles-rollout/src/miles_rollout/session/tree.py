"""The session tree: what a request continues, what a generation adds, and which tokens are trained.

A pure state machine without I/O, clock or tokenizer:

    plan(request) --------> Plan --------> (caller renders and samples) --------> commit(plan, ...) -> Node
         |  refused: nothing changed              | failed: nothing changed            | the only write

Linear and branching sessions are the same append-only tree. They differ in what `plan` accepts:

- *linear*: the request must contain the whole history; it may leave out the last reply, and then that turn is
  replaced (a retry). Anything else is refused with the first message and field that differ.
- *branching*: the request continues the deepest node whose messages it starts with, or starts a new root.

Nothing is ever deleted. A retried turn stays in the tree as an *abandoned* node, is never trained, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import Message, MessageMatcher
from miles_rollout.session.errors import (
    BadRequestError,
    HistoryDivergedError,
    NodeLimitError,
    SessionBusyError,
    TruncatedTurnError,
)
from miles_rollout.session.matching import ALL_REPAIRS, Repair, strict
from miles_rollout.session.nodes import Generation, Node, PathMessages, Tools, path_ids
from miles_rollout.session.replay import START, Replay, Trail, diverged, with_stored_id


class Policy(StrEnum):
    """What a request may do to a session's history."""

    LINEAR = "linear"
    """Extend it at its tail, or retry the last turn; one trajectory."""
    BRANCHING = "branching"
    """Continue any node or start over; one trajectory per leaf."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How a request will be served. Nothing is written before it is committed.

    Attributes:
        parent: the node it continues, None when the prompt is rendered from its beginning.
        appended: messages after the parent's reply, tool-call ids in the stored spelling.
        tools: tools of the prompt.
        retried: the node that a commit will abandon (linear only).
        repairs: what had to be overlooked in which node's reply.
        id_map: rewritten tool-call id -> stored id, in effect after `appended`.
        begun: commits of the session when this plan was made.
    """

    parent: Node | None
    appended: tuple[Message, ...]
    tools: Tools
    retried: Node | None
    repairs: tuple[tuple[Node, frozenset[Repair]], ...]
    id_map: dict[str, str]
    begun: int

    def history_messages(self) -> PathMessages:
        """Messages of the stored prefix."""
        return PathMessages(self.parent)


class SessionTree:
    """All generations of one session.

    Args:
        policy: linear or branching.
        matcher: decides whether a replayed message is the stored one.
        repairs: what may be overlooked in copies of the policy's own messages.
        max_nodes: most generations the session may hold.
    """

    def __init__(
        self,
        policy: Policy = Policy.LINEAR,
        matcher: MessageMatcher = strict,
        *,
        repairs: frozenset[Repair] = ALL_REPAIRS,
        max_nodes: int = 1024,
    ) -> None:
        self.policy = policy
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self.tip: Node | None = None
        """Linear: the last turn of the history. Branching: the node committed last."""
        self._replay = Replay(matcher, repairs)
        self._max_nodes = max_nodes

    # -- planning -------------------------------------------------------------------------------------------

    def plan(self, messages: Sequence[Message], tools: Tools = ()) -> Plan:
        """Decide what a chat request continues.

        Raises:
            BadRequestError: no messages, or the last one is the assistant's.
            HistoryDivergedError: linear, and the request is not this session's history continued.
            TruncatedTurnError: the turn it continues was cut by its length limit.
            NodeLimitError: the session is full.
        """
        self._check_request(messages)
        if self.policy is Policy.LINEAR:
            return self._plan_linear(messages, tools)
        parent, trail = self._deepest(messages, tools)
        return self._finish(parent, trail, messages, tools, None)

    def plan_after(self, node: Node, rest: Sequence[Message], tools: Tools) -> Plan | None:
        """The plan of a request whose messages up to and including `node.messages` are known to match.

        Args:
            node: a committed node.
            rest: the request's remaining messages; the first must be the copy of the node's reply.
            tools: tools of the request.

        Returns:
            None when this does not settle it (the caller then takes `plan` with the whole request).

        Raises:
            As `plan`.
        """
        if not rest or node.reply is None or node.tools != tools:
            return None
        # A second assistant message may belong to a deeper node; an older linear node may not be continued.
        if any(m.role == "assistant" for m in rest[1:]) or (self.policy is Policy.LINEAR and node is not self.tip):
            return None
        trail = Trail(0, node.id_map, ())
        if self._replay.match_reply(node, rest, trail) is not None:
            return None
        self._check_request(rest)
        return self._finish(node, trail, rest, tools, None)

    def plan_ids(self, token_ids: NDArray[np.int32]) -> tuple[Plan, NDArray[np.int32]]:
        """Decide what a token-level request continues: the deepest node whose ids it starts with.

        Returns:
            The plan, and the ids after the stored prefix (int32).

        Raises:
            BadRequestError: no ids, or nothing new after the stored prefix.
            HistoryDivergedError, TruncatedTurnError, NodeLimitError: as `plan`.
        """
        self.check_room()
        if token_ids.shape[0] == 0:
            raise BadRequestError("prompt: give at least one token id", param="prompt")
        best, size = self._deepest_ids(token_ids)
        retried = None
        if self.policy is Policy.LINEAR and best is not self.tip:
            tip = self.tip
            assert tip is not None
            if best is not tip.parent or not np.array_equal(
                token_ids[size : size + len(tip.prompt_ids)], tip.prompt_ids
            ):
                stored = path_ids(tip.path())
                common = min(len(stored), len(token_ids))
                differ = np.flatnonzero(stored[:common] != token_ids[:common])
                at = int(differ[0]) if differ.size else common
                raise HistoryDivergedError(
                    f"prompt: the ids leave this linear session's history at position {at}; a prompt must start "
                    f"with all {len(stored)} stored ids, or leave out the last turn's sampled ids to retry it",
                    message_index=-1,
                    field=f"prompt[{at}]",
                )
            retried = tip
        if size == token_ids.shape[0]:
            raise BadRequestError("prompt: it adds nothing to the stored ids", param="prompt")
        return self._finish(best, Trail(0, best.id_map if best else {}, ()), (), best.tools if best else (), retried), (
            token_ids[size:]
        )

    def _check_request(self, messages: Sequence[Message]) -> None:
        self.check_room()
        if not messages:
            raise BadRequestError("messages: give at least one message", param="messages")
        if messages[-1].role == "assistant":
            raise BadRequestError(
                "messages: the last one is the assistant's, which leaves nothing to answer; "
                "append a user or tool message (continuing an assistant message is not supported)",
                param="messages",
            )

    def check_room(self, coming: int = 0) -> None:
        """Refuse another turn when the session is full.

        Args:
            coming: turns that are being sampled and will be committed.

        Raises:
            NodeLimitError: there is no place left.
        """
        if len(self.nodes) + coming >= self._max_nodes:
            raise NodeLimitError(
                f"the session holds {len(self.nodes) + coming} turns, its limit; open a new session or raise max_nodes"
            )

    def _finish(
        self, parent: Node | None, trail: Trail, messages: Sequence[Message], tools: Tools, retried: Node | None
    ) -> Plan:
        if parent is not None and parent.sampled.truncated:
            raise TruncatedTurnError(
                f"turn {parent.seq} (message {parent.num_messages - 1}) was cut by its length limit after "
                f"{len(parent.sampled.output_ids)} tokens and cannot be continued; "
                "send the request without it to sample it again, or end the episode",
                param="messages",
            )
        appended = tuple(with_stored_id(m, trail.id_map) for m in messages[trail.index :])
        return Plan(
            parent=parent,
            appended=appended,
            tools=tools,
            retried=retried,
            repairs=trail.repairs,
            id_map=trail.id_map,
            begun=len(self.nodes),
        )

    def _plan_linear(self, messages: Sequence[Message], tools: Tools) -> Plan:
        if self.tip is None:
            return self._finish(None, START, messages, tools, None)
        path = self.tip.path()
        if path[0].tools != tools:
            raise HistoryDivergedError(
                "tools: they differ from those of this linear session's first turn, which are part of every "
                "prompt; send the same tools in the same order, or open a new session",
                message_index=-1,
                field="tools",
            )
        if any(node.reply is None for node in path):
            raise BadRequestError(
                "messages: this linear session holds token-level turns, which no message stands for; "
                "continue it through its completions endpoint",
                param="messages",
            )
        trail = Trail(0, {}, ())
        for node in path:
            before = Trail(trail.index, trail.id_map, trail.repairs)
            miss = self._replay.match(node, messages, trail)
            if miss is None:
                continue
            left_out = miss.in_reply and (miss.difference is None or miss.difference.field == "role")
            if node is self.tip and left_out:
                return self._finish(node.parent, before, messages, tools, node)
            raise diverged(node, miss, messages)
        return self._finish(self.tip, trail, messages, tools, None)

    def _deepest(self, messages: Sequence[Message], tools: Tools) -> tuple[Node | None, Trail]:
        """The node that covers most messages of the request; of equals, the one committed last."""
        best: Node | None = None
        best_trail = START
        stack = [(root, START) for root in self.roots if root.tools == tools]
        while stack:
            node, before = stack.pop()
            trail = Trail(before.index, before.id_map, before.repairs)
            if node.reply is None or self._replay.match(node, messages, trail) is not None:
                continue
            if best is None or (trail.index, node.seq) > (best_trail.index, best.seq):
                best, best_trail = node, trail
            stack.extend((child, trail) for child in node.children)
        return best, best_trail

    def _deepest_ids(self, token_ids: NDArray[np.int32]) -> tuple[Node | None, int]:
        best: Node | None = None
        size = 0
        if self.policy is Policy.LINEAR:
            live = set(self.tip.path()) if self.tip is not None else set()
        else:
            live = set(self.nodes)
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            if node not in live:
                continue
            middle, end = node.sampled_start, node.end
            same = np.array_equal(token_ids[node.start : middle], node.prompt_ids)
            if not same or not np.array_equal(token_ids[middle:end], node.sampled.output_ids):
                continue
            if best is None or (end, node.seq) > (size, best.seq):
                best, size = node, end
            stack.extend(node.children)
        return best, size

    # -- writing --------------------------------------------------------------------------------------------

    def commit(
        self,
        plan: Plan,
        prompt_ids: NDArray[np.int32],
        sampled: Generation,
        reply: Message | None,
        *,
        opening: int = 0,
    ) -> Node:
        """Add a generation: the only write.

        Args:
            plan: what the request continues.
            prompt_ids: int32 [P], the new suffix that was given to the engine after the ids of the parent's path.
            sampled: what the engine sampled after it.
            reply: the assistant message for the client, None for a token-level completion.
            opening: how many of the last prompt ids open a forced call.

        Raises:
            SessionBusyError: linear, and another request was committed since the plan was made.
        """
        if self.policy is Policy.LINEAR and plan.begun != len(self.nodes):
            raise SessionBusyError("another request changed this linear session meanwhile; send the request again")
        parent = plan.parent
        start = parent.end if parent is not None else 0
        node = Node(
            seq=len(self.nodes),
            begun=plan.begun,
            parent=parent,
            messages=plan.appended,
            reply=reply,
            prompt_ids=prompt_ids,
            sampled=msgspec.structs.replace(sampled, routing=None),
            routing=sampled.routing,
            start=start,
            num_messages=(parent.num_messages if parent else 0) + len(plan.appended) + (reply is not None),
            tools=plan.tools,
            id_map=plan.id_map,
            opening=opening,
            demoted=sum(m.role == "assistant" for m in plan.appended),
        )
        (self.roots if parent is None else parent.children).append(node)
        self.nodes.append(node)
        for repaired, kinds in plan.repairs:
            repaired.repairs |= kinds
        self._note_retry(node, plan)
        self.tip = node
        return node

    # -- reading --------------------------------------------------------------------------------------------

    def leaves(self) -> list[Node]:
        """Leaves that become trajectories, in order of commit; abandoned ones are left out."""
        return [node for node in self.nodes if not node.children and not self.abandoned(node)]

    def abandoned(self, node: Node) -> bool:
        """True when the client retried this turn and nothing ever continued it; it is not trained."""
        return node.retried and not node.children

    def _note_retry(self, node: Node, plan: Plan) -> None:
        """Mark what `node` retries.

        Linear: the turn whose reply the client left out. Branching: siblings of the same prompt that had been
        answered when the request came (parallel samples of one prompt are no retries).
        """
        if plan.retried is not None:
            plan.retried.retried = True
        if self.policy is Policy.LINEAR:
            return
        for other in self.roots if node.parent is None else node.parent.children:
            if (
                other.seq < node.begun
                and other.messages == node.messages
                and other.tools == node.tools
                and np.array_equal(other.prompt_ids, node.prompt_ids)
            ):
                other.retried = True
