"""The engine as sessions see it: one call that samples, and an answer that is checked before it is believed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miles_contracts import (
    DeadlineExceededError,
    Engine,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    SamplingParams,
    VersionSpan,
    narrowest_dtype,
)
from miles_rollout.engine_stream import OnPartial, generate_on
from miles_rollout.router import Router
from miles_rollout.session.errors import (
    UpstreamError,
    UpstreamRefusedError,
    UpstreamTimeoutError,
    UpstreamUnavailableError,
)
from miles_rollout.session.nodes import Generation

_LOGPROB_SLACK = 1e-3
"""A log-prob may exceed 0 by rounding of the engine's softmax; more is nonsense."""
_REFUSALS = (400, 413, 422)
"""Statuses by which an engine says that a request is not right."""
_ABORT_S = 10.0
"""Longest wait for an abort that nobody waits for."""


class Sampler(Protocol):
    """Samples continuations for sessions."""

    async def generate(
        self,
        key: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        routing: bool,
        routing_start: int = 0,
        on_partial: OnPartial | None = None,
    ) -> GenerateResult:
        """Sample after a prompt.

        Args:
            key: the session; calls with one key should reach one engine, whose prefix cache is warm.
            input_ids: the whole prompt.
            params: how to sample.
            request_id: a fresh name for the request.
            routing: record expert choices.
            routing_start: leave out those of the first so many tokens, which the session has.
            on_partial: is shown the ids while they are sampled, if that can be done at all.
        """
        ...

    def forget(self, key: str) -> None:
        """The session is over."""
        ...


class EngineSampler:
    """Sends everything to one engine, and aborts there what its caller no longer waits for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        key: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        routing: bool,
        routing_start: int = 0,
        on_partial: OnPartial | None = None,
    ) -> GenerateResult:
        """See `Sampler.generate`."""
        try:
            return await generate_on(
                self._engine,
                input_ids,
                params,
                request_id=request_id,
                routing=routing,
                routing_start=routing_start,
                on_partial=on_partial,
            )
        except asyncio.CancelledError:
            task = asyncio.create_task(self._abort(request_id), name=f"abort-{request_id}")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineError, DeadlineExceededError, TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._engine.abort(request_id)

    def forget(self, key: str) -> None:
        """Nothing is kept for a session."""


class RouterSampler:
    """Sends a session's turns to the engine that the router keeps for it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def generate(
        self,
        key: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        routing: bool,
        routing_start: int = 0,
        on_partial: OnPartial | None = None,
    ) -> GenerateResult:
        """See `Sampler.generate`; the router names the request itself, anew for every engine it tries."""
        return await self._router.generate(
            key, input_ids, params, routing=routing, routing_start=routing_start, on_partial=on_partial
        )

    def forget(self, key: str) -> None:
        """Free the session's place."""
        self._router.forget(key)


async def call(
    sampler: Sampler,
    key: str,
    input_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    routing: bool,
    routing_start: int = 0,
    timeout_s: float,
    on_partial: OnPartial | None = None,
) -> GenerateResult:
    """Ask the engine; whatever goes wrong there becomes an error that a client understands.

    Raises:
        UpstreamTimeoutError: no answer in time.
        UpstreamUnavailableError: it could not be reached, or died.
        UpstreamError: it refused, or answered nonsense.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await sampler.generate(
                key,
                input_ids,
                params,
                request_id=request_id,
                routing=routing,
                routing_start=routing_start,
                on_partial=on_partial,
            )
    except EngineUnavailableError as error:
        raise UpstreamUnavailableError(f"{error}; the session is unchanged, send the request again") from error
    except EngineError as error:
        refused = error.status in _REFUSALS
        raise (UpstreamRefusedError if refused else UpstreamError)(f"{error}; the session is unchanged") from error
    except (DeadlineExceededError, TimeoutError) as error:
        said = f" ({error})" if str(error) else ""
        raise UpstreamTimeoutError(
            f"the engine gave no answer within {timeout_s:g} s{said}; the session is unchanged, send the request again"
        ) from error


def check(
    result: GenerateResult,
    *,
    prompt_tokens: int,
    budget: int,
    stop_token_ids: frozenset[int],
    request_id: str,
    vocab_size: int | None,
    routing: bool,
    num_experts: int | None,
    routing_start: int = 0,
) -> Generation:
    """Turn an engine's answer into a generation.

    A turn is truncated when the engine says `length`, or when it used its whole budget and does not end with a
    stop token: token counts decide, whatever else the engine or a parser makes of the text.

    Args:
        result: the answer.
        prompt_tokens: length of the prompt.
        budget: most tokens that were asked for.
        stop_token_ids: tokens that end a turn.
        request_id: name of the request.
        vocab_size: ids are below it, None when not known.
        routing: expert choices were asked for.
        num_experts: experts a layer, None when not known.
        routing_start: those of the first so many tokens were not asked for.

    Raises:
        UpstreamUnavailableError: the engine aborted the request.
        UpstreamError: the answer contradicts itself; the message names the field.
    """
    ids = _int32(result.output_ids)
    n = ids.shape[0]
    if result.finish_reason == "abort":
        raise UpstreamUnavailableError(
            f"the engine aborted the request after {n} tokens; the session is unchanged, send the request again"
        )
    if result.finish_reason not in ("stop", "length"):
        raise UpstreamError(f"engine answer: finish_reason {result.finish_reason!r} is not stop, length or abort")
    if n > budget:
        raise UpstreamError(f"engine answer: {n} tokens sampled, at most {budget} were asked for")
    if n and (int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size)):
        raise UpstreamError(f"engine answer: token ids in [{ids.min()}, {ids.max()}] leave [0, {vocab_size})")
    whole = n == budget and not (n and int(ids[-1]) in stop_token_ids)
    truncated = result.finish_reason == "length" or whole
    return Generation(
        output_ids=ids,
        logprobs=_logprobs(result.logprobs, n),
        version_spans=_spans(result.version_spans, n),
        finish_reason="length" if truncated else "stop",
        truncated=truncated,
        cached_tokens=result.cached_tokens,
        routing=_routing(result.routing, max(prompt_tokens + n - 1 - routing_start, 0), num_experts)
        if routing
        else None,
        request_id=request_id,
    )


def _int32(values: Any) -> NDArray[np.int32]:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise UpstreamError(f"engine answer: output_ids has dtype {ids.dtype} and shape {ids.shape}, not int [N]")
    return ids.astype(np.int32)


def _logprobs(values: Any, n: int) -> NDArray[np.float32]:
    try:
        logprobs = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UpstreamError(f"engine answer: log-probs are no numbers ({error})") from error
    if logprobs.shape != (n,):
        raise UpstreamError(f"engine answer: {logprobs.shape} log-probs for {n} output ids")
    if not np.isfinite(logprobs).all() or (n and float(logprobs.max()) > _LOGPROB_SLACK):
        raise UpstreamError("engine answer: a log-prob is positive or not finite")
    return np.minimum(logprobs, np.float32(0.0))


def _spans(spans: tuple[VersionSpan, ...], n: int) -> tuple[VersionSpan, ...]:
    if not spans and n:
        return (VersionSpan(start=0, end=n, version=None),)
    at = 0
    for span in spans:
        if span.start != at:
            break
        at = span.end
    else:
        if at == n:
            return tuple(spans)
    edges = [(s.start, s.end) for s in spans]
    raise UpstreamError(f"engine answer: weight versions of {edges} do not cover the {n} sampled tokens")


def _routing(rows: Any, want: int, num_experts: int | None) -> NDArray[Any]:
    """The rows, copied, in the narrowest dtype."""
    if rows is None:
        raise UpstreamError("engine answer: no routing, although it was asked for")
    shape = tuple(getattr(rows, "shape", ()))
    if len(shape) != 3 or shape[0] != want:
        raise UpstreamError(
            f"engine answer: routing has shape {shape}, not [{want} (tokens fed for the first time), layers, top_k]"
        )
    array = np.asarray(rows)
    if not np.issubdtype(array.dtype, np.integer):
        raise UpstreamError(f"engine answer: routing has dtype {array.dtype}, not int")
    if num_experts is None:
        return array.copy()
    if array.size and (int(array.min()) < 0 or int(array.max()) >= num_experts):
        raise UpstreamError(f"engine answer: expert ids leave [0, {num_experts})")
    return array.astype(narrowest_dtype(num_experts))
