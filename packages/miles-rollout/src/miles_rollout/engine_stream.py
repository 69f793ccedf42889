"""Answers that are read while the engine still samples them: server-sent events, and a call that falls back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from miles_contracts import Engine, EngineUnavailableError, GenerateResult, SamplingParams

OnPartial = Callable[[NDArray[np.int32]], bool]
"""Takes all ids sampled so far (int32 [N]); True once something of them was passed on and cannot be taken back."""


@dataclass(frozen=True)
class PartialResult:
    """What an engine has sampled so far; nothing of it is verified yet.

    Attributes:
        output_ids: int32 [N], all of them from the first.
    """

    output_ids: NDArray[np.int32]


class StreamingEngine(Protocol):
    """What an engine has beside `miles_contracts.Engine` when it can show an answer before it is finished."""

    def generate_stream(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> AsyncGenerator[PartialResult | GenerateResult, None]:
        """As `Engine.generate`: any number of growing partial results, then the result, which comes last."""
        ...


async def generate_on(
    engine: Engine,
    input_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    routing: bool,
    routing_start: int = 0,
    on_partial: OnPartial | None,
) -> GenerateResult:
    """Sample on one engine; `on_partial` sees the answer grow where the engine can stream.

    Raises: as `Engine.generate`; EngineUnavailableError also for a stream that ends before its answer.
    """
    if on_partial is None or not hasattr(engine, "generate_stream"):
        return await engine.generate(
            input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
        )
    streaming = cast("StreamingEngine", engine)
    async with aclosing(
        streaming.generate_stream(
            input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
        )
    ) as results:
        async for result in results:
            if isinstance(result, GenerateResult):
                return result
            on_partial(result.output_ids)
    raise EngineUnavailableError(engine.url, "its stream ended before the answer was finished")


class EventBuffer:
    """Cuts a byte stream into the data of server-sent events, in time linear in its length."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._scanned = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes; gives the data of every event that is whole now, the closing `[DONE]` left out."""
        self._bytes += chunk
        while (end := self._bytes.find(b"\n\n", self._scanned)) >= 0:
            event = bytes(self._bytes[:end])
            del self._bytes[: end + 2]
            self._scanned = 0
            if event.startswith(b"data:") and (data := event[5:].strip()) != b"[DONE]":
                yield data
        self._scanned = max(len(self._bytes) - 1, 0)


class GrowingAnswer:
    """What the events of one streamed answer say together.

    Args:
        increments: an event has the new tokens only; otherwise each has all of them so far.
    """

    def __init__(self, *, increments: bool) -> None:
        self._increments = increments
        self._ids: list[int] = []
        self._logprobs: list[Any] = []

    def add(self, event: dict[str, Any]) -> dict[str, Any]:
        """The answer so far in the form of an event that has everything; call it with every event, in order."""
        if not self._increments:
            return event
        meta = event["meta_info"]
        self._ids += event.get("output_ids") or []
        self._logprobs += meta.get("output_token_logprobs") or []
        return {**event, "output_ids": self._ids, "meta_info": {**meta, "output_token_logprobs": self._logprobs}}
