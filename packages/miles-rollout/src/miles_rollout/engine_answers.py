"""Bodies of /generate and what its answers mean: checked once, here, so that nothing further in has to doubt them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import (
    EngineError,
    GenerateResult,
    InvalidFieldError,
    RoutingTrace,
    SamplingParams,
    VersionSpan,
)
from miles_rollout.routing_rows import RoutingRows, encoded_bytes
from miles_rollout.token_ids import TokenIds


def generate_body(input_ids: Sequence[int], params: SamplingParams, request_id: str | None) -> dict[str, Any]:
    """The body of one generation."""
    body: dict[str, Any] = {
        "input_ids": _ids_field(input_ids),
        "sampling_params": _sampling_fields(params),
        "return_logprob": True,
    }
    if request_id is not None:
        body["rid"] = request_id
    return body


def _ids_field(ids: Sequence[int]) -> msgspec.Raw | list[int]:
    if isinstance(ids, TokenIds):
        return msgspec.Raw(ids.json)
    return ids if isinstance(ids, list) else list(ids)


def batch_body(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], request_ids: Sequence[str]
) -> dict[str, Any]:
    """The body of one call for several generations."""
    return {
        "rid": list(request_ids),
        "input_ids": [[int(i) for i in prompt] for prompt in prompts],
        "sampling_params": [_sampling_fields(p) for p in params],
        "return_logprob": True,
    }


def routing_fields(routing: bool, start: int = 0, *, stream: bool = False) -> dict[str, Any]:
    """Fields of a body that ask for the expert choices of tokens `start` .., or nothing.

    The embedded engine answers with packed bits in a binary frame, and in a stream, which is text, with base64 of
    the narrowest dtype. SGLang knows no formats: it ignores that field and answers in its own.
    """
    if not routing:
        return {}
    return {
        "return_routed_experts": True,
        "routed_experts_start_len": start,
        "routed_experts_format": "narrow" if stream else "bits",
    }


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


def mapping(value: Any, engine: str, where: str) -> dict[str, Any]:
    """`value`, which has to be an object.

    Raises:
        EngineError: it is not.
    """
    if not isinstance(value, dict):
        raise EngineError(engine, f"{where} answered {type(value).__name__}, expected an object")
    return value


def parse_version(value: object) -> int | None:
    """A weight version as a number of updates; anything but a decimal number means unknown (None)."""
    text = str(value) if value is not None else ""
    return int(text) if text.isascii() and text.isdigit() else None


def result_of(
    answer: Any,
    *,
    engine: str,
    prompt_tokens: int,
    routing: bool,
    routing_start: int = 0,
    routing_layers: int | None = None,
    routing_top_k: int | None = None,
) -> GenerateResult:
    """What one finished answer says; `routing` may still be encoded (`RoutingRows`).

    Args:
        answer: decoded JSON, or a decoded frame.
        engine: URL, for errors.
        prompt_tokens: length of the prompt.
        routing: expert choices were asked for.
        routing_start: those of the first so many tokens were left out.
        routing_layers: rows per token of SGLang's flat form.
        routing_top_k: experts per token of SGLang's flat form, None when not known.

    Raises:
        EngineError: the answer contradicts itself.
    """
    body = mapping(answer, engine, "/generate")
    meta = mapping(body.get("meta_info"), engine, "/generate meta_info")
    triples = meta.get("output_token_logprobs") or []
    ids = np.asarray(body.get("output_ids") if "output_ids" in body else [t[1] for t in triples], dtype=np.int32)
    logprobs = np.asarray([t[0] for t in triples], dtype=np.float32)
    if len(ids) != len(triples):
        raise EngineError(engine, f"{len(ids)} output ids but {len(triples)} log-probs")
    if len(ids) and not np.array_equal(ids, np.asarray([t[1] for t in triples], dtype=np.int32)):
        raise EngineError(engine, "output_ids and output_token_logprobs name different tokens")
    if not np.isfinite(logprobs).all():
        raise EngineError(engine, "a log-prob is not finite")
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in ("stop", "length", "abort"):
        raise EngineError(engine, f"finish_reason is {reason!r}; expected stop, length or abort")
    cached = meta.get("cached_tokens")
    rows = max(prompt_tokens + len(ids) - 1 - routing_start, 0)
    return GenerateResult(
        output_ids=ids,
        logprobs=logprobs,
        version_spans=_spans(meta, len(ids), engine),
        finish_reason=kind,
        cached_tokens=int(cached) if cached is not None else None,
        routing=_routes(meta, rows, engine, routing_layers, routing_top_k) if routing else None,
        routing_s=float(meta.get("routed_experts_s") or 0.0) if routing else 0.0,
        request_id=meta.get("id"),
    )


def _spans(meta: Mapping[str, Any], count: int, engine: str) -> tuple[VersionSpan, ...]:
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
    if not edges or edges[0][0] != 0 or edges[-1][1] != count or _gaps(edges):
        raise EngineError(engine, f"version spans {edges} do not cover {count} output tokens")
    return spans


def _gaps(edges: Sequence[tuple[int, int]]) -> bool:
    return any(left[1] != right[0] for left, right in itertools.pairwise(edges))


def _routes(
    meta: Mapping[str, Any], rows: int, engine: str, layers: int | None, top_k: int | None
) -> RoutingRows | NDArray[Any]:
    trace = meta.get("routed_experts_trace")
    if isinstance(trace, RoutingTrace):
        _check_rows(trace.expert_ids.shape, rows, engine)
        return trace.expert_ids
    packed = meta.get("routed_experts_packed")
    if packed is not None:
        text, dtype = packed["data"], np.dtype(packed["dtype"])
        shape = tuple(int(n) for n in packed["shape"])
    else:
        text, dtype = meta.get("routed_experts"), np.dtype("<i4")
        if text is None:
            reason = "the answer carries no routed experts; start the engine with them enabled"
            raise EngineError(engine, reason)
        shape = _flat_shape(encoded_bytes(text) // dtype.itemsize, rows, engine, layers, top_k)
    _check_rows(shape, rows, engine)
    try:
        return RoutingRows(text, (shape[0], shape[1], shape[2]), dtype)
    except InvalidFieldError as error:
        raise EngineError(engine, f"routed experts for {rows} fed tokens: {error}") from error


def _check_rows(shape: tuple[int, ...], rows: int, engine: str) -> None:
    if len(shape) != 3 or shape[0] != rows:
        raise EngineError(engine, f"routed experts of shape {shape} for {rows} fed tokens")


def _flat_shape(count: int, rows: int, engine: str, layers: int | None, top_k: int | None) -> tuple[int, int, int]:
    """Shape of SGLang's flat buffer of `count` ids, which does not say how many experts a token has.

    Without `top_k`, rows that nobody asked for would look like more experts a token.
    """
    if layers is None:
        raise EngineError(engine, "SGLang's routed experts carry no shape; give EngineClient(routing_layers=)")
    if rows == 0:
        return 0, layers, top_k or 0
    found = count // (layers * rows)
    if top_k is not None and found != top_k:
        raise EngineError(
            engine, f"{count} routed experts are not those of {rows} fed tokens in {layers} layers with top-{top_k}"
        )
    return rows, layers, found
