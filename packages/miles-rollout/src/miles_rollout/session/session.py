"""One session: its tree, how it is sampled, and what the engine said to it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from miles_contracts import Message, SamplingParams, SamplingTransform, Trajectory, TrajectoryIdentity
from miles_rollout.session.assemble import trajectories, tree_counters
from miles_rollout.session.audit import SampleRecord, SessionCounters
from miles_rollout.session.errors import BadRequestError, SessionBusyError
from miles_rollout.session.messages import parse_messages
from miles_rollout.session.nodes import Node, Tools, path_messages
from miles_rollout.session.rawprefix import RawPrefixes, RawText
from miles_rollout.session.requests import parse_tools
from miles_rollout.session.tree import Plan, Policy, SessionTree


class RenderChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Render options that a session keeps from its first turn on; None leaves the family's default."""

    thinking: bool | None = None
    reasoning_effort: str | None = None


class Session:
    """State of one session; nothing here waits or talks to anybody.

    Args:
        session_id: unguessable.
        tree: its generations.
        identity: of its trajectories.
        pinned: sampling settings that win over those of requests.
        render: render options chosen when it was opened, None to let the first turn choose.
        metadata: the opener's.
        now: monotonic seconds.
    """

    def __init__(
        self,
        session_id: str,
        tree: SessionTree,
        *,
        identity: TrajectoryIdentity,
        pinned: SamplingParams | None,
        render: RenderChoice | None,
        metadata: dict[str, Any],
        now: float,
    ) -> None:
        self.id = session_id
        self.tree = tree
        self.identity = identity
        self.pinned = pinned
        self.transform: SamplingTransform | None = pinned.transform if pinned is not None else None
        self.render = render
        self.metadata = metadata
        self.last_used = now
        self.closed = False
        self.lock = asyncio.Lock()
        self.in_flight: set[asyncio.Task[Any]] = set()
        self.records: dict[str, SampleRecord] = {}
        self._events = SessionCounters()
        self._prefixes = RawPrefixes(capacity=1 if tree.policy is Policy.LINEAR else 4)
        self._tools: dict[bytes, Tools] = {}

    def tools(self, raw: bytes) -> Tools:
        """Decode a request's tools; a text that was seen before is not decoded again."""
        known = self._tools.get(raw)
        if known is None:
            known = parse_tools(raw)
            if len(self._tools) >= 4:
                self._tools.clear()
            self._tools[raw] = known
        return known

    def plan(self, raw_messages: RawText, tools: Tools) -> tuple[Plan, int]:
        """Match a chat request; only what no earlier request contained is decoded.

        Returns:
            The plan, and the number of messages in the request.
        """
        found = self._prefixes.find(raw_messages)
        if found is not None:
            node, count, rest_raw = found
            rest = parse_messages(rest_raw, count)
            plan = self.tree.plan_after(node, rest, tools)
            if plan is not None:
                return plan, count + len(rest)
        messages = parse_messages(raw_messages.view)
        return self.tree.plan(messages, tools), len(messages)

    def remember(self, raw_messages: RawText, node: Node, num_messages: int) -> None:
        """Note the text of a request that was answered."""
        self._prefixes.remember(raw_messages, node, num_messages)

    def choose_render(self, wanted: RenderChoice) -> RenderChoice:
        """The render options of a request: those of the session, which a request may repeat but not change.

        Raises:
            BadRequestError: it asks for others than the session's first turn.
        """
        if self.render is None:
            return wanted
        for name in ("thinking", "reasoning_effort"):
            asked, kept = getattr(wanted, name), getattr(self.render, name)
            if asked is not None and asked != kept:
                raise BadRequestError(
                    f"{name}: got {asked!r}, this session is rendered with {kept!r} from its first turn on; "
                    "use another session",
                    param=name,
                )
        return self.render

    def settle(self, transform: SamplingTransform, render: RenderChoice | None) -> None:
        """The first committed turn fixes how all turns are sampled and rendered.

        Raises:
            SessionBusyError: of several first turns at once, another one was answered first, with other settings.
        """
        if self.tree.nodes and (self.transform, self.render) != (transform, render):
            raise SessionBusyError(
                "another first turn of this session was answered meanwhile with other sampling or render settings; "
                "send the request again with those, or use another session"
            )
        self.transform, self.render = transform, render

    def count(self, events: SessionCounters) -> None:
        """Add to counters that do not follow from the tree."""
        self._events = self._events + events

    def counters(self) -> SessionCounters:
        """What happened so far."""
        return tree_counters(self.tree) + self._events

    def trajectories(self, num_experts: int | None) -> tuple[Trajectory, ...]:
        """One per leaf; see `assemble.trajectories`."""
        return trajectories(
            self.tree,
            self.identity,
            self.transform or SamplingTransform(),
            records=self.records,
            counters=self.counters(),
            num_experts=num_experts,
        )

    def last_reply(self) -> str:
        """Content of the turn committed last, "" when there is none."""
        tip = self.tree.tip
        return (tip.reply.content or "") if tip is not None and tip.reply is not None else ""

    def describe(self) -> dict[str, Any]:
        """The JSON object of `GET /sessions/{id}`."""
        leaves = self.tree.leaves()
        return {
            "session_id": self.id,
            "policy": str(self.tree.policy),
            "in_flight": len(self.in_flight),
            "counters": msgspec.to_builtins(self.counters()),
            "nodes": [_describe_node(n, self.tree.abandoned(n)) for n in self.tree.nodes],
            "leaves": [[n.seq for n in leaf.path()] for leaf in leaves],
            "messages": [m.to_dict() for m in _messages_of(self.tree)],
            "metadata": self.metadata,
        }


def _messages_of(tree: SessionTree) -> list[Message]:
    return path_messages(tree.tip.path()) if tree.tip is not None else []


def _describe_node(node: Node, abandoned: bool) -> dict[str, Any]:
    return {
        "turn": node.seq,
        "parent": None if node.parent is None else node.parent.seq,
        "request_id": node.sampled.request_id,
        "prompt_tokens": node.sampled_start,
        "new_prompt_tokens": len(node.prompt_ids),
        "forced_tokens": node.opening,
        "sampled_tokens": len(node.sampled.output_ids),
        "finish_reason": node.sampled.finish_reason,
        "abandoned": abandoned,
        "repairs": sorted(node.repairs),
    }
