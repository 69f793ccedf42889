"""A trajectory is exactly what the policy sampled: ids, log-probs, versions and a mask born with the tokens.

Positions are indices into `token_ids`. Log-probs are known (finite, <= 0) exactly where a version span
covers a token, and NaN everywhere else: the spans say which tokens the policy sampled, the mask says which
of those are trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from miles_contracts.arrays import BoolArray, FloatArray, IntArray, check_array
from miles_contracts.errors import InvalidFieldError
from miles_contracts.routing import RoutingTrace


class Status(StrEnum):
    """How a trajectory ended, decided from token counts and never from a parser's word."""

    FINISHED = "finished"
    """The policy ended by itself (stop token, stop string, or the environment's end)."""
    TRUNCATED = "truncated"
    """A length limit ended it; it cannot be extended."""
    ABORTED = "aborted"
    """Somebody ended it on purpose; what was sampled so far may be kept."""
    FAILED = "failed"
    """An engine, environment or reward failed; never trained, never a zero reward."""


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start` (inclusive) to `end` (exclusive) were sampled under weight version `version`.

    `version` is the number of optimiser updates in the weights; None means that the engine did not say.
    """

    start: int
    end: int
    version: int | None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidFieldError("VersionSpan", (self.start, self.end), "need 0 <= start < end")
        if self.version is not None and self.version < 0:
            raise InvalidFieldError("VersionSpan.version", self.version, "a version is >= 0, or None when unknown")


class SamplingTransform(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to the logits before a token was drawn.

    The recorded log-probs are of softmax(logits / temperature), before top-p, top-k and min-p cut the
    support. `temperature` 0 means greedy: log-probs are then those of temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidFieldError("SamplingTransform.temperature", self.temperature, "use a finite value >= 0")
        if not 0 < self.top_p <= 1:
            raise InvalidFieldError("SamplingTransform.top_p", self.top_p, "use a value in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise InvalidFieldError("SamplingTransform.top_k", self.top_k, "use -1 (off) or a value >= 1")
        if not 0 <= self.min_p <= 1:
            raise InvalidFieldError("SamplingTransform.min_p", self.min_p, "use a value in [0, 1]")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation inside a trajectory: the engine was given `[0, start)` and sampled `[start, end)`.

    An empty completion has start == end. `cached_tokens` counts prompt tokens found in the engine's prefix
    cache, None when the engine did not say.
    """

    start: int
    end: int
    finish_reason: str
    request_id: str | None = None
    cached_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidFieldError("Turn", (self.start, self.end), "need 0 <= start <= end")


class TrajectoryIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trajectory belongs.

    Attributes:
        prompt_index: ordinal of the prompt in the data stream (never reused; epochs continue the count).
        member: which of the group's n samples this is, 0-based.
        attempt: 0 for the first try at this prompt, +1 with every retry.
        leaf: which branch of the session, 0 for a linear one.
        session_id: the session that made it, "" outside a session server.
    """

    prompt_index: int
    member: int
    attempt: int = 0
    leaf: int = 0
    session_id: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt_index", "member", "attempt", "leaf"):
            if getattr(self, name) < 0:
                raise InvalidFieldError(f"TrajectoryIdentity.{name}", getattr(self, name), "use a value >= 0")


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, tag="trajectory", eq=False):
    """The tokens of one rollout as the trainer will see them. T is the number of tokens.

    Attributes:
        identity: where it belongs.
        token_ids: int32 [T], prompt, sampled and observed tokens in the order the engine saw them.
        loss_mask: bool [T], true only for sampled tokens that are to be trained.
        logprobs: float32 [T], log-prob (nats) at sampling time inside version spans, NaN outside.
        version_spans: sorted, disjoint; they cover exactly the sampled tokens.
        status: how it ended.
        sampling: the transform the log-probs were taken under.
        turns: the generations, in order.
        reward: finite scalar, or None while unscored or when scoring failed.
        routing: expert choices of the first T-1 tokens, or None.
        metrics: finite numbers worth averaging (reward parts, tool calls, seconds waited ...).
        metadata: JSON-like extras; never read by the trainer.
        error: reason, for a failed or aborted one.
    """

    identity: TrajectoryIdentity
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    version_spans: tuple[VersionSpan, ...]
    status: Status
    sampling: SamplingTransform = SamplingTransform()
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    routing: RoutingTrace | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    error: str | None = None

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        n = self.token_ids.shape[0] if isinstance(self.token_ids, np.ndarray) and self.token_ids.ndim else 0
        set_field(self, "token_ids", check_array("Trajectory.token_ids", self.token_ids, "int32", 1))
        set_field(self, "loss_mask", check_array("Trajectory.loss_mask", self.loss_mask, "bool", 1, n))
        set_field(self, "logprobs", check_array("Trajectory.logprobs", self.logprobs, "float32", 1, n))
        if n and int(self.token_ids.min()) < 0:
            raise InvalidFieldError("Trajectory.token_ids", int(self.token_ids.min()), "token ids are >= 0")
        sampled = self._check_spans(n)
        if bool((self.loss_mask & ~sampled).any()):
            where = int(np.flatnonzero(self.loss_mask & ~sampled)[0])
            raise InvalidFieldError("Trajectory.loss_mask", where, "only sampled tokens may be trained")
        known = ~np.isnan(self.logprobs)
        if not np.array_equal(known, sampled):
            where = int(np.flatnonzero(known != sampled)[0])
            raise InvalidFieldError(
                "Trajectory.logprobs", where, "log-probs are known exactly at sampled tokens, NaN elsewhere"
            )
        if bool((self.logprobs[sampled] > 0).any()) or bool(np.isinf(self.logprobs[sampled]).any()):
            raise InvalidFieldError("Trajectory.logprobs", "positive or infinite", "log-probs are finite and <= 0")
        self._check_turns(n)
        if self.reward is not None and not math.isfinite(self.reward):
            raise InvalidFieldError("Trajectory.reward", self.reward, "a reward is finite, or None when unknown")
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise InvalidFieldError(f"Trajectory.metrics[{name!r}]", value, "metrics are finite numbers")
        if self.routing is not None and self.routing.num_tokens not in (n, max(n - 1, 0)):
            raise InvalidFieldError("Trajectory.routing", self.routing.num_tokens, f"need T-1 rows, T is {n}")

    def _check_spans(self, n: int) -> BoolArray:
        sampled = np.zeros(n, dtype=np.bool_)
        previous = 0
        for span in self.version_spans:
            if span.start < previous or span.end > n:
                raise InvalidFieldError(
                    "Trajectory.version_spans", (span.start, span.end), f"sorted and disjoint inside [0, {n})"
                )
            sampled[span.start : span.end] = True
            previous = span.end
        return sampled

    def _check_turns(self, n: int) -> None:
        previous = 0
        for turn in self.turns:
            if turn.start < previous or turn.end > n:
                raise InvalidFieldError("Trajectory.turns", (turn.start, turn.end), f"in order inside [0, {n}]")
            previous = turn.end

    @property
    def num_tokens(self) -> int:
        """T, prompt included."""
        return int(self.token_ids.shape[0])

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, trained or not."""
        return sum(span.end - span.start for span in self.version_spans)

    @property
    def num_trained(self) -> int:
        """Tokens that enter the loss."""
        return int(self.loss_mask.sum())

    @property
    def has_unknown_version(self) -> bool:
        """True when some sampled token's weight version is not known."""
        return any(span.version is None for span in self.version_spans)

    @property
    def oldest_version(self) -> int | None:
        """Smallest known weight version, None when nothing was sampled or a span's version is unknown."""
        if self.has_unknown_version or not self.version_spans:
            return None
        return min(span.version for span in self.version_spans if span.version is not None)

    @property
    def newest_version(self) -> int | None:
        """Largest known weight version, None when nothing was sampled or a span's version is unknown."""
        if self.has_unknown_version or not self.version_spans:
            return None
        return max(span.version for span in self.version_spans if span.version is not None)

    def replace(self, **changes: Any) -> Trajectory:
        """A copy with `changes`, checked like a new one."""
        return msgspec.structs.replace(self, **changes)


class Group(msgspec.Struct, frozen=True, kw_only=True, tag="group", eq=False):
    """The trajectories of one prompt: `size` members, each with one trajectory or (branching) several.

    Attributes:
        prompt_index: ordinal of the prompt in the data stream.
        size: the number n of members that were asked for.
        trajectories: at least one per member that did not vanish, ordered by (member, leaf).
        attempt: the try this is at the prompt.
        metadata: JSON-like extras of the prompt (task name, label ...).
    """

    prompt_index: int
    size: int
    trajectories: tuple[Trajectory, ...]
    attempt: int = 0
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidFieldError("Group.size", self.size, "a group has at least one member")
        keys = [(t.identity.member, t.identity.leaf) for t in self.trajectories]
        if keys != sorted(set(keys)):
            raise InvalidFieldError("Group.trajectories", keys, "unique and ordered by (member, leaf)")
        for t in self.trajectories:
            if t.identity.prompt_index != self.prompt_index:
                raise InvalidFieldError(
                    "Group.trajectories", t.identity.prompt_index, f"all of prompt {self.prompt_index}"
                )
            if t.identity.member >= self.size:
                raise InvalidFieldError("Group.trajectories", t.identity.member, f"member < size {self.size}")

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories, prompts included."""
        return sum(t.num_tokens for t in self.trajectories)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that this group keeps alive."""
        total = 0
        for t in self.trajectories:
            total += t.token_ids.nbytes + t.loss_mask.nbytes + t.logprobs.nbytes
            total += t.routing.num_bytes if t.routing is not None else 0
        return total

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version of any token; None when nothing was sampled or a version is unknown."""
        versions = [t.oldest_version for t in self.trajectories if t.version_spans]
        known = [v for v in versions if v is not None]
        return min(known) if known and len(known) == len(versions) else None

    @property
    def failed(self) -> bool:
        """True when a member is missing, failed or was aborted."""
        members = {t.identity.member for t in self.trajectories}
        return len(members) < self.size or any(t.status in (Status.FAILED, Status.ABORTED) for t in self.trajectories)
