"""The seams of the system. Anything that fits a protocol can stand in; nobody inherits.

Arrays are numpy, tensors stay opaque (`Any`): this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from miles_contracts.messages import Message
from miles_contracts.trajectory import Group, SamplingTransform, Trajectory, VersionSpan
from miles_contracts.weights import Arrival, GroupRequest, ShmBucket, TensorSpec, WeightManifest


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one generation is sampled; the fields are SGLang's `sampling_params`."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def transform(self) -> SamplingTransform:
        """The part that changes the distribution."""
        return SamplingTransform(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine sampled after a prompt. N is the number of new tokens.

    Attributes:
        output_ids: N ids.
        logprobs: N log-probs (nats), temperature applied.
        version_spans: positions count from the first new token.
        finish_reason: `stop`, `length` or `abort`.
        cached_tokens: prompt tokens found in the prefix cache, None when not said.
        routing: expert ids [prompt + N - 1 - routing_start, layers, top_k] of the tokens that were fed, from token
            `routing_start` on (0 unless the caller asked otherwise); None when not asked for.
        routing_s: seconds that recording them took the engine, 0 when not said.
        request_id: the engine's name for the request.
    """

    output_ids: Any
    logprobs: Any
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    cached_tokens: int | None = None
    routing: Any = None
    routing_s: float = 0.0
    request_id: str | None = None


class PauseMode(StrEnum):
    """What happens to running requests while weights change."""

    RETRACT = "retract"
    """Back to the queue; their KV cache is computed again under the new weights."""
    IN_PLACE = "in_place"
    """Frozen; they keep their KV cache and go on under the new weights."""
    ABORT = "abort"
    """Ended with what they have."""


class Engine(Protocol):
    """A server that samples from the policy (SGLang's native calls)."""

    @property
    def url(self) -> str: ...
    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult: ...
    async def abort(self, request_id: str | None = None) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def weight_version(self) -> int | None: ...
    async def healthy(self) -> bool: ...
    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None: ...
    async def load_bucket(self, bucket: ShmBucket) -> None: ...
    async def commit_weight_update(self, update_id: str) -> None: ...
    async def rollback_weight_update(self, update_id: str) -> None: ...
    async def load_from_disk(self, path: Path, version: int) -> None: ...


class WeightGroup(Protocol):
    """An engine's membership in a group that weights come through. Used from one thread at a time, but for `close`."""

    @property
    def address(self) -> str:
        """What senders need to reach this member, "" when the meeting point is all they need."""

    def receive(self, bucket: Mapping[str, Any]) -> Sequence[Arrival]:
        """Take part in one transfer.

        Args:
            bucket: the body of `/update_weights_from_distributed`.

        Raises:
            WeightUpdateError: it failed, or what came is not what was announced.
        """

    def close(self) -> None:
        """Leave; a transfer that waits for others fails, here and there."""


WeightGroupFactory = Callable[[GroupRequest, Sequence[TensorSpec]], WeightGroup]
"""Joins a group, given what the engine holds. May block until all ranks have come."""


class TrainerBackend(Protocol):
    """A model that can be trained, in the ranks of one trainer group.

    A batch is a list of trajectories with one advantage array each; what they mean is decided above.
    """

    def train(self, batch: Any) -> Mapping[str, float]: ...
    def score(self, trajectories: Sequence[Trajectory]) -> Sequence[Any]: ...
    def weight_specs(self, version: int) -> WeightManifest: ...
    def export_weights(self) -> Iterable[tuple[str, Any]]: ...
    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """One item of the data stream.

    Attributes:
        prompt_index: ordinal in the stream.
        messages: the prompt as chat messages.
        label: the reference answer, None where the reward needs none.
        metadata: JSON-like extras for the environment and the reward.
        source: name of the task or file it came from.
    """

    prompt_index: int
    messages: tuple[Message, ...]
    label: Any = None
    metadata: dict[str, Any] = {}
    source: str = ""


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent reports after an episode."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}


class Agent(Protocol):
    """A black-box harness: talks to `base_url` in the OpenAI chat API until the episode is over."""

    def __call__(
        self, base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]
    ) -> Awaitable[AgentResult]: ...


class Generate(Protocol):
    """Makes the trajectories of one member of a group (one, or several when a session branched)."""

    def __call__(self, task: Task, member: int, attempt: int) -> Awaitable[Sequence[Trajectory]]: ...


class RolloutFn(Protocol):
    """Makes a whole batch; replaces the worker."""

    def __call__(self, tasks: Sequence[Task], policy_version: int) -> Awaitable[Sequence[Group]]: ...


class Reward(Protocol):
    """Scores one finished trajectory given its decoded response text."""

    def __call__(self, task: Task, response: str) -> Awaitable[float] | float: ...


class FilterDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to keep a group, and why not."""

    keep: bool
    reason: str = ""


GroupFilter = Callable[[Group], FilterDecision]


class Renderer(Protocol):
    """Turns chat messages into token ids for one model family; append-only by proof."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


class MessageMatcher(Protocol):
    """True when a replayed message is the stored one."""

    def __call__(self, stored: Message, replayed: Message) -> bool: ...


class Evaluator(Protocol):
    """Measures one weight version on held-out tasks."""

    def __call__(self, version: int, checkpoint: Path | None) -> Awaitable[Mapping[str, float]]: ...


class MetricSink(Protocol):
    """Takes one record a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
