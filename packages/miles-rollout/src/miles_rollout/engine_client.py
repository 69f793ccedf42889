"""EngineClient: an engine that speaks SGLang's native HTTP calls, seen as `miles_contracts.Engine`.

Every wait has a deadline with a name; what goes wrong is one of three errors: the engine could not be reached
(`EngineUnavailableError`, safe to send elsewhere), it refused or answered nonsense (`EngineError`), or it was too
slow (`DeadlineExceededError`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from miles_contracts import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    InvalidFieldError,
    PauseMode,
    SamplingParams,
)
from miles_rollout.engine_answers import batch_body, generate_body, mapping, parse_version, result_of, routing_fields
from miles_rollout.engine_http import Deadlines, EngineHttp, beside_loop, message_of, require_success
from miles_rollout.engine_identity import EngineIdentity, EngineKind, context_tokens, identity_of, require_supported
from miles_rollout.engine_stream import GrowingAnswer, PartialResult
from miles_rollout.engine_weights import WeightCalls
from miles_rollout.routing_rows import RoutingRows

__all__ = ["Deadlines", "EngineClient", "parse_version"]

_HEALTH_S = 5.0
_FLUSH_S = 10.0


class EngineClient(WeightCalls):
    """One engine behind a URL.

    Args:
        url: base URL, for example `http://127.0.0.1:30000`.
        deadlines: longest waits.
        routing_layers: rows per token of SGLang's flat routed-experts buffer (its decoder layers). Only needed
            for an engine that answers in SGLang's form, which does not carry the shape.

    The connection pool belongs to the event loop of the first call; close with `await close()` or `async with`.
    """

    def __init__(self, url: str, *, deadlines: Deadlines | None = None, routing_layers: int | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._http = EngineHttp(url, self._deadlines.connect)
        super().__init__(self._http, self._deadlines.weights)
        self._routing_layers = routing_layers
        self._routing_top_k: int | None = None
        self._identity: EngineIdentity | None = None

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return self._url

    @property
    def address(self) -> str:
        """Where calls go: `url`, until the engine was started again elsewhere."""
        return self._http.base

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def move_to(self, url: str) -> None:
        """The engine was started again and answers at `url` from now on.

        The client's own `url` stays what it was: it is the name under which routers and reports know the engine.
        """
        await self._http.move_to(url)

    async def close(self) -> None:
        """Close the connection pool; idempotent."""
        await self._http.close()

    # -- what it is ---------------------------------------------------------------------------------------------

    async def identify(self) -> EngineIdentity:
        """What the engine says it is; asked once, then remembered (an engine that is restarted stays what it is)."""
        if self._identity is None:
            self._identity = identity_of(await self.server_info())
        return self._identity

    async def require_supported(self, *, routing: bool = False) -> None:
        """Refuse an engine of a kind or version that this client does not know, or that lacks what a run needs.

        Args:
            routing: the run needs expert choices.

        Raises:
            EngineError: naming what is wrong and what to do.
        """
        require_supported(self._url, await self.identify(), routing=routing)

    async def healthy(self) -> bool:
        """Whether the engine's server answers; never raises for an engine that does not.

        SGLang's own health call samples a token, so that a paused engine would look ill: it is asked for facts instead.
        SGLang ends as a whole when one of its processes dies.
        """
        wait = min(_HEALTH_S, self._deadlines.control)
        try:
            kind = await self._kind_or_none()
            path = "/model_info" if kind is EngineKind.SGLANG else "/health"
            await self._http.call("GET", path, None, "a health check", wait)
        except (EngineError, DeadlineExceededError):
            return False
        return True

    async def _kind_or_none(self) -> EngineKind | None:
        """None for an engine without the call that tells."""
        try:
            return (await self.identify()).kind
        except EngineError as error:
            if error.status != 404:
                raise
            return None

    async def streams_batches(self) -> bool:
        """Whether `generate_each` may be used."""
        return await self._kind_or_none() is not None and (await self.identify()).batched_streams

    async def server_info(self) -> dict[str, Any]:
        """`/server_info` as the engine gives it."""
        answer = await self._http.call("GET", "/server_info", None, "server info", self._deadlines.control)
        return mapping(answer, self._url, "/server_info")

    async def context_tokens(self) -> int | None:
        """Most tokens of a prompt and its completion; None when the engine does not say. Asked anew each time."""
        return context_tokens(await self.server_info())

    async def weight_version(self) -> int | None:
        """Number of optimiser updates in the weights; None when the engine does not know it."""
        answer = await self._http.call("GET", "/model_info", None, "the weight version", self._deadlines.control)
        return parse_version(mapping(answer, self._url, "/model_info").get("weight_version"))

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        """Sample a continuation of `input_ids` (at least one id).

        Args:
            routing: return the expert choices of the fed tokens.
            routing_start: leave out the rows of the first so many tokens (at most the prompt's length): a session
                has them from earlier turns.

        Raises:
            EngineError: the engine refused the request, or its answer contradicts itself.
            EngineUnavailableError: it could not be reached or died.
            DeadlineExceededError: no answer within `Deadlines.generate`; the request is aborted on the engine.
        """
        payload = generate_body(input_ids, params, request_id) | routing_fields(routing, routing_start)
        try:
            answer = await self._http.call("POST", "/generate", payload, "a generation", self._deadlines.generate)
        except DeadlineExceededError:
            if request_id is not None:
                await self._abort_quietly(request_id)
            raise
        return await self._result(answer, len(input_ids), routing, routing_start)

    async def generate_stream(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> AsyncGenerator[PartialResult | GenerateResult, None]:
        """As `generate`, and shows the answer while it grows: partial results, then the result, which comes last.

        An engine that does not stream gives the result alone. Close the generator (`contextlib.aclosing`) to hang
        up before the end; the embedded engine and SGLang then abort the request.

        Raises: as `generate`; EngineUnavailableError also for a stream that breaks off.
        """
        payload = generate_body(input_ids, params, request_id) | {"stream": True}
        payload |= routing_fields(routing, routing_start, stream=True)
        increments = await self._kind_or_none() is not None and (await self.identify()).incremental_streams
        growing = GrowingAnswer(increments=increments)
        deadline = self._deadlines.generate
        try:
            async with aclosing(
                self._http.events("/generate", payload, "a generation", deadline, every=increments)
            ) as events:
                async for event in events:
                    body = mapping(event, self._url, "/generate")
                    if "error" in body:
                        raise EngineError(self._url, f"a generation: {message_of(msgspec.json.encode(body))}")
                    meta = mapping(body.get("meta_info"), self._url, "/generate meta_info")
                    answer = growing.add(body)
                    if meta.get("finish_reason") is not None:
                        yield await self._result(answer, len(input_ids), routing, routing_start)
                        return
                    yield PartialResult(np.asarray(answer.get("output_ids") or [], dtype=np.int32))
        except DeadlineExceededError:
            if request_id is not None:
                await self._abort_quietly(request_id)
            raise
        raise EngineUnavailableError(self._url, "a generation: the stream ended before the answer was finished")

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
        routing: bool = False,
        routing_starts: Sequence[int] | None = None,
    ) -> list[GenerateResult]:
        """Sample a continuation of every prompt, in one call: the engine queues all of them at once, in order.

        Args:
            routing_starts: one for each prompt, as `routing_start` of `generate`; None for 0.

        Raises: as `generate`; one refused prompt refuses the whole call.
        """
        starts = list(routing_starts or [0] * len(prompts))
        first = min(starts, default=0)  # the engine takes one for all; the others' surplus is cut off below
        payload = batch_body(prompts, params, request_ids) | routing_fields(routing, first)
        what = f"{len(prompts)} generations"
        try:
            answers = await self._http.call("POST", "/generate", payload, what, self._deadlines.generate)
        except DeadlineExceededError:
            await asyncio.gather(*(self._abort_quietly(request_id) for request_id in request_ids))
            raise
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise EngineError(self._url, f"/generate did not answer with a list of {len(prompts)}")
        results = [await self._result(a, len(p), routing, first) for a, p in zip(answers, prompts, strict=True)]
        if not routing:
            return results
        return [
            msgspec.structs.replace(r, routing=r.routing[start - first :])
            for r, start in zip(results, starts, strict=True)
        ]

    async def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        request_ids: Sequence[str],
    ) -> AsyncGenerator[tuple[int, GenerateResult], None]:
        """As `generate_batch`, and gives each result when it is there, with its index.

        For an engine with `batched_streams`. Close the generator (`contextlib.aclosing`) to hang up before the end;
        what has not finished is then aborted.

        Raises: as `generate_batch`; EngineUnavailableError also for a stream that breaks off.
        """
        payload = batch_body(prompts, params, request_ids) | {"stream": True}
        what, deadline = f"{len(prompts)} generations", self._deadlines.generate
        left = set(range(len(prompts)))
        async with aclosing(self._http.events("/generate", payload, what, deadline, every=True)) as events:
            async for event in events:
                body = mapping(event, self._url, "/generate")
                index = body.get("index")
                if not isinstance(index, int) or index not in left:
                    raise EngineError(self._url, f"/generate answered for prompt {index!r}, expected one of {left}")
                left.remove(index)
                yield index, await self._result(body, len(prompts[index]), False, 0)
        if left:
            raise EngineUnavailableError(self._url, f"{what}: the stream ended before {len(left)} were finished")

    async def _result(self, answer: Any, prompt_tokens: int, routing: bool, start: int) -> GenerateResult:
        """The checked answer; its routes are decoded, beside the event loop when they are many."""
        result = result_of(
            answer,
            engine=self._url,
            prompt_tokens=prompt_tokens,
            routing=routing,
            routing_start=start,
            routing_layers=self._routing_layers,
            routing_top_k=self._routing_top_k if start else None,
        )
        if not routing:
            return result
        rows = result.routing
        if isinstance(rows, RoutingRows):
            try:
                rows = await beside_loop(rows.nbytes, np.asarray, rows)
            except InvalidFieldError as error:
                raise EngineError(self._url, f"routed experts: {error}") from error
        if start == 0 and len(rows):
            self._routing_top_k = rows.shape[2]
        return msgspec.structs.replace(result, routing=rows)

    async def _abort_quietly(self, request_id: str) -> None:
        """Abort after a deadline; a failure here must not hide the deadline's error."""
        try:
            await self.abort(request_id)
        except (EngineError, DeadlineExceededError):
            return

    async def abort(self, request_id: str | None = None) -> None:
        """End one request (None: all of them); their callers get what was sampled so far."""
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self._control("/abort_request", body, "an abort")

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; what happens to running requests is `mode`'s business."""
        await self._control("/pause_generation", {"mode": str(mode)}, f"a pause ({mode})")

    async def resume(self) -> None:
        """Sample again."""
        await self._control("/continue_generation", {}, "a resume")

    async def flush_cache(self) -> None:
        """Forget every cached prefix. SGLang refuses while requests run, the embedded engine never does.

        A request whose answer has just been read may still be under way in SGLang: it is given time to end.
        """
        await self._control(f"/flush_cache?timeout={_FLUSH_S:g}", {}, "a cache flush")

    async def _control(self, path: str, body: Mapping[str, Any], what: str) -> Any:
        answer = await self._http.call("POST", path, body, what, self._deadlines.control)
        require_success(self._url, answer)
        return answer
