"""EngineClient: an engine that speaks SGLang's native HTTP calls, seen as `miles_contracts.Engine`.

Every wait has a deadline with a name; what goes wrong is one of three errors: the engine could not be reached
(`EngineUnavailableError`, safe to send elsewhere), it refused or answered nonsense (`EngineError`), or it was too
slow (`DeadlineExceededError`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
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
    ShmBucket,
    VersionSpan,
    WeightManifest,
)
from miles_rollout.engine_stream import EventBuffer, PartialResult
from miles_rollout.routing_rows import RoutingRows, encoded_bytes

SUPPORTED = "the embedded engine, or SGLang >= 0.5.20, < 0.6"
"""What the client was written against; named when a call is missing."""

_OFF_LOOP_BYTES = 1 << 20
"""Answers from this size on are decoded in a thread, so that the event loop keeps turning."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Longest waits in seconds; each is named in the error it raises.

    Attributes:
        connect: opening a connection.
        generate: one whole generation, including the time in the engine's queue and in pauses.
        control: pause, resume, abort, flush, version and health calls.
        weights: one call of a weight update (a bucket, begin, commit, or a load from disk).
    """

    connect: float = 10.0
    generate: float = 3600.0
    control: float = 60.0
    weights: float = 600.0

    def __post_init__(self) -> None:
        for name in ("connect", "generate", "control", "weights"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidFieldError(f"Deadlines.{name}", value, "use a finite number of seconds > 0")


class EngineClient:
    """One engine behind a URL.

    Args:
        url: base URL, for example `http://127.0.0.1:30000`.
        deadlines: longest waits.
        routing_layers: rows per token of SGLang's flat routed-experts buffer (its decoder layers). Only needed
            for an engine that answers in SGLang's form, which does not carry the shape.

    The connection pool belongs to the event loop of the first call; close with `await close()` or `async with`.
    """

    def __init__(self, url: str, *, deadlines: Deadlines | None = None, routing_layers: int | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidFieldError("EngineClient.url", url, "give a URL like http://127.0.0.1:30000")
        self._url = url.rstrip("/")
        self._deadlines = deadlines or Deadlines()
        self._routing_layers = routing_layers
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return self._url

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection pool; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
    ) -> GenerateResult:
        """Sample a continuation of `input_ids` (at least one id).

        Raises:
            EngineError: the engine refused the request, or its answer contradicts itself.
            EngineUnavailableError: it could not be reached or died.
            DeadlineExceededError: no answer within `Deadlines.generate`; the request is aborted on the engine.
        """
        payload = _generate_body(input_ids, params, request_id, routing)
        try:
            answer = await self._call("POST", "/generate", payload, "a generation", self._deadlines.generate)
        except DeadlineExceededError:
            if request_id is not None:
                await self._abort_quietly(request_id)
            raise
        return self._result(answer, len(payload["input_ids"]), routing)

    async def generate_stream(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
    ) -> AsyncGenerator[PartialResult | GenerateResult, None]:
        """As `generate`, and shows the answer while it grows: partial results, then the result, which comes last.

        An engine that does not stream gives the result alone. Close the generator (`contextlib.aclosing`) to hang
        up before the end; the embedded engine and SGLang then abort the request.

        Raises: as `generate`; EngineUnavailableError also for a stream that breaks off.
        """
        payload = _generate_body(input_ids, params, request_id, routing) | {"stream": True}
        try:
            async with aclosing(self._answers("/generate", payload, "a generation", self._deadlines.generate)) as all_:
                async for answer in all_:
                    body = _mapping(answer, self._url, "/generate")
                    if "error" in body:
                        raise EngineError(self._url, f"a generation: {_message_of(msgspec.json.encode(body))}")
                    meta = _mapping(body.get("meta_info"), self._url, "/generate meta_info")
                    if meta.get("finish_reason") is not None:
                        yield self._result(answer, len(payload["input_ids"]), routing)
                        return
                    yield PartialResult(np.asarray(body.get("output_ids") or [], dtype=np.int32))
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
    ) -> list[GenerateResult]:
        """Sample a continuation of every prompt, in one call: the engine queues all of them at once, in order.

        Raises: as `generate`; one refused prompt refuses the whole call.
        """
        payload: dict[str, Any] = {
            "rid": list(request_ids),
            "input_ids": [[int(i) for i in prompt] for prompt in prompts],
            "sampling_params": [_sampling_fields(p) for p in params],
            "return_logprob": True,
        }
        if routing:
            payload["return_routed_experts"] = True
            payload["routed_experts_format"] = "narrow"
        what = f"{len(prompts)} generations"
        try:
            answers = await self._call("POST", "/generate", payload, what, self._deadlines.generate)
        except DeadlineExceededError:
            await asyncio.gather(*(self._abort_quietly(request_id) for request_id in request_ids))
            raise
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise EngineError(self._url, f"/generate did not answer with a list of {len(prompts)}")
        return [self._result(a, len(p), routing) for a, p in zip(answers, prompts, strict=True)]

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
        """Forget every cached prefix. SGLang refuses while requests run; the embedded engine never does."""
        await self._control("/flush_cache", {}, "a cache flush")

    async def healthy(self) -> bool:
        """Whether the engine's server answers; never raises for an engine that does not."""
        try:
            await self._call("GET", "/health", None, "a health check", min(5.0, self._deadlines.control))
        except (EngineError, DeadlineExceededError):
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        """`/get_server_info` as the engine gives it."""
        answer = await self._call("GET", "/get_server_info", None, "server info", self._deadlines.control)
        return _mapping(answer, self._url, "/get_server_info")

    async def weight_version(self) -> int | None:
        """Number of optimiser updates in the weights; None when the engine does not know it."""
        wait = self._deadlines.control
        try:
            answer = await self._call("GET", "/get_weight_version", None, "the weight version", wait)
        except EngineError as error:
            if error.status != 404:
                raise
            answer = await self._call("GET", "/model_info", None, "the weight version", wait)
        return parse_version(_mapping(answer, self._url, "/get_weight_version").get("weight_version"))

    # -- weights ------------------------------------------------------------------------------------------------

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update transaction; the engine refuses a manifest that does not describe its model."""
        body = {"update_id": update_id, "manifest": msgspec.to_builtins(manifest)}
        await self._weights("/begin_weight_update", body, f"begin of weight update {update_id}")

    async def load_bucket(self, bucket: ShmBucket) -> None:
        """Let the engine copy one shared-memory bucket into its staged weights and verify the digests."""
        body = {"load_format": "miles_shm", "bucket": msgspec.to_builtins(bucket)}
        what = f"bucket {bucket.index} of weight update {bucket.update_id}"
        await self._weights("/update_weights_from_tensor", body, what)

    async def commit_weight_update(self, update_id: str) -> None:
        """Make the staged weights the serving ones; refused unless every tensor of the manifest is in."""
        body = {"update_id": update_id, "commit": True}
        await self._weights("/end_weight_update", body, f"commit of weight update {update_id}")

    async def rollback_weight_update(self, update_id: str) -> None:
        """Forget the staged weights; the old ones serve on. Harmless for an unknown or finished update."""
        body = {"update_id": update_id, "commit": False}
        await self._weights("/end_weight_update", body, f"rollback of weight update {update_id}")

    async def load_from_disk(self, path: Path, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder, all or nothing."""
        body = {"model_path": str(path), "weight_version": str(version)}
        await self._weights("/update_weights_from_disk", body, f"weights from {path}")

    # -- transport ----------------------------------------------------------------------------------------------

    async def _control(self, path: str, body: Mapping[str, Any], what: str) -> Any:
        answer = await self._call("POST", path, body, what, self._deadlines.control)
        self._require_success(answer)
        return answer

    async def _weights(self, path: str, body: Mapping[str, Any], what: str) -> Any:
        answer = await self._call("POST", path, body, what, self._deadlines.weights)
        self._require_success(answer)
        return answer

    def _require_success(self, answer: Any) -> None:
        """SGLang says some failures in the body of a 200."""
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(self._url, str(answer.get("message", "the engine reported failure")))

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, what: str, deadline_s: float) -> Any:
        data, headers = _encoded(body)
        with self._faults(path, what, deadline_s):
            async with asyncio.timeout(deadline_s):
                async with self._pool().request(method, self._url + path, data=data, headers=headers) as response:
                    raw = await response.read()
                    status, content_type = response.status, response.content_type
        if status >= 400:
            raise self._refusal(path, what, status, raw)
        if content_type != "application/json":
            return raw.decode(errors="replace")
        return await self._decoded(path, raw, status)

    async def _answers(
        self, path: str, body: Mapping[str, Any], what: str, deadline_s: float
    ) -> AsyncGenerator[Any, None]:
        """The JSON of a streamed answer's events; of those that arrive together only the newest."""
        data, headers = _encoded(body)
        until = asyncio.get_running_loop().time() + deadline_s
        with self._faults(path, what, deadline_s):
            # A deadline must not be open across a yield: it would cancel whatever the reader does meanwhile.
            async with asyncio.timeout_at(until):
                response = await self._pool().post(self._url + path, data=data, headers=headers)
            async with response:
                if response.status >= 400 or response.content_type != "text/event-stream":
                    async with asyncio.timeout_at(until):
                        raw = await response.read()
                    if response.status >= 400:
                        raise self._refusal(path, what, response.status, raw)
                    yield await self._decoded(path, raw, response.status)
                    return
                events = EventBuffer()
                while True:
                    async with asyncio.timeout_at(until):
                        chunk = await response.content.readany()
                    if not chunk:
                        return
                    if whole := list(events.feed(chunk)):
                        yield await self._decoded(path, whole[-1], response.status)

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._deadlines.connect)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    @contextmanager
    def _faults(self, path: str, what: str, deadline_s: float) -> Iterator[None]:
        """What goes wrong on the way becomes an error with a name."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"no connection within {self._deadlines.connect:g} s for {what}"
            raise EngineUnavailableError(self._url, reason) from error
        except TimeoutError as error:
            remedy = f"raise the deadline or look at the engine's log ({self._url}{path})"
            raise DeadlineExceededError(f"{what} on {self._url}", deadline_s, remedy) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailableError(self._url, f"{what}: {type(error).__name__}: {error}") from error

    async def _decoded(self, path: str, raw: bytes, status: int) -> Any:
        try:
            if len(raw) >= _OFF_LOOP_BYTES:
                return await asyncio.to_thread(msgspec.json.decode, raw)
            return msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise EngineError(self._url, f"{path} answered something that is not JSON: {error}", status) from error

    def _refusal(self, path: str, what: str, status: int, raw: bytes) -> EngineError:
        reason = _message_of(raw)
        if status == 404 and not reason.startswith("unknown"):
            return EngineError(self._url, f"it has no {path} (needed for {what}); use {SUPPORTED}", status)
        if status in (502, 503, 504):
            return EngineUnavailableError(self._url, f"{what}: {reason}", status)
        return EngineError(self._url, f"{what}: {reason}", status)

    # -- answers ------------------------------------------------------------------------------------------------

    def _result(self, answer: Any, prompt_tokens: int, routing: bool) -> GenerateResult:
        body = _mapping(answer, self._url, "/generate")
        meta = _mapping(body.get("meta_info"), self._url, "/generate meta_info")
        triples = meta.get("output_token_logprobs") or []
        ids = np.asarray(body.get("output_ids") if "output_ids" in body else [t[1] for t in triples], dtype=np.int32)
        logprobs = np.asarray([t[0] for t in triples], dtype=np.float32)
        if len(ids) != len(triples):
            raise EngineError(self._url, f"{len(ids)} output ids but {len(triples)} log-probs")
        if len(ids) and not np.array_equal(ids, np.asarray([t[1] for t in triples], dtype=np.int32)):
            raise EngineError(self._url, "output_ids and output_token_logprobs name different tokens")
        if not np.isfinite(logprobs).all():
            raise EngineError(self._url, "a log-prob is not finite")
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else None
        if kind not in ("stop", "length", "abort"):
            raise EngineError(self._url, f"finish_reason is {reason!r}; expected stop, length or abort")
        cached = meta.get("cached_tokens")
        return GenerateResult(
            output_ids=ids,
            logprobs=logprobs,
            version_spans=self._spans(meta, len(ids)),
            finish_reason=kind,
            cached_tokens=int(cached) if cached is not None else None,
            routing=self._routes(meta, prompt_tokens + len(ids) - 1) if routing else None,
            request_id=meta.get("id"),
        )

    def _spans(self, meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
        if count == 0:
            return ()
        listed = meta.get("weight_versions")
        if not listed:
            return (VersionSpan(start=0, end=count, version=parse_version(meta.get("weight_version"))),)
        spans = tuple(
            VersionSpan(start=int(s["start"]), end=int(s["end"]), version=parse_version(s["version"]))
            for s in listed
            if s["end"] > s["start"]
        )
        edges = [(s.start, s.end) for s in spans]
        if edges[0][0] != 0 or edges[-1][1] != count or _gaps(edges):
            raise EngineError(self._url, f"version spans {edges} do not cover {count} output tokens")
        return spans

    def _routes(self, meta: Mapping[str, Any], rows: int) -> RoutingRows:
        packed = meta.get("routed_experts_packed")
        if packed is not None:
            text, dtype = packed["data"], np.dtype(packed["dtype"])
            shape = tuple(int(n) for n in packed["shape"])
        else:
            text, dtype = meta.get("routed_experts"), np.dtype("<i4")
            if text is None:
                reason = "the answer carries no routed experts; start the engine with them enabled"
                raise EngineError(self._url, reason)
            if self._routing_layers is None:
                raise EngineError(
                    self._url, "SGLang's routed experts carry no shape; give EngineClient(routing_layers=)"
                )
            per_row = dtype.itemsize * self._routing_layers * max(rows, 1)
            shape = (rows, self._routing_layers, encoded_bytes(text) // per_row if rows else 0)
        if len(shape) != 3 or shape[0] != rows:
            raise EngineError(self._url, f"routed experts of shape {shape} for {rows} fed tokens")
        try:
            return RoutingRows(text, shape, dtype)
        except InvalidFieldError as error:
            raise EngineError(self._url, f"routed experts for {rows} fed tokens: {error}") from error


def _plain_int(value: object) -> int:
    """Lets numpy's integers stand among ids, without a pass over a long prompt that has none."""
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to an engine")


def _gaps(edges: Sequence[tuple[int, int]]) -> bool:
    return any(left[1] != right[0] for left, right in itertools.pairwise(edges))


def parse_version(value: object) -> int | None:
    """A weight version as a number of updates; anything but a decimal number means unknown (None)."""
    text = str(value) if value is not None else ""
    return int(text) if text.isascii() and text.isdigit() else None


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        fields["sampling_seed"] = params.seed
    return fields


def _mapping(value: Any, engine: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(engine, f"{where} answered {type(value).__name__}, expected an object")
    return value


def _generate_body(
    input_ids: Sequence[int], params: SamplingParams, request_id: str | None, routing: bool
) -> dict[str, Any]:
    """The body of one generation."""
    body: dict[str, Any] = {
        "input_ids": input_ids if isinstance(input_ids, list) else list(input_ids),
        "sampling_params": _sampling_fields(params),
        "return_logprob": True,
    }
    if request_id is not None:
        body["rid"] = request_id
    if routing:
        body["return_routed_experts"] = True
        body["routed_experts_format"] = "narrow"
    return body


def _encoded(body: Mapping[str, Any] | None) -> tuple[bytes | None, dict[str, str]]:
    """A body as bytes, and its headers."""
    if body is None:
        return None, {}
    return msgspec.json.encode(body, enc_hook=_plain_int), {"Content-Type": "application/json"}


def _message_of(raw: bytes) -> str:
    """The reason in a refusal: SGLang puts it under `error.message`, `message` or `detail`, or in plain text."""
    text = raw.decode(errors="replace").strip()
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return text[:500] or "no reason given"
    if isinstance(body, dict):
        nested = body.get("error")
        if isinstance(nested, dict) and nested.get("message"):
            return str(nested["message"])
        for key in ("message", "detail", "error"):
            if body.get(key):
                return str(body[key])
    return text[:500] or "no reason given"
