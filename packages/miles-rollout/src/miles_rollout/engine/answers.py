"""Builds the JSON answer of /generate from a sequence, in SGLang's form. Pure."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from miles_contracts import RoutingTrace, narrowest_dtype
from miles_rollout.engine.routes import dtype_name
from miles_rollout.engine.sequence import Sequence


def generate_answer(sequence: Sequence, text: str, *, logprobs: bool, weight_version: str) -> dict[str, Any]:
    """One answer without its routes: `text`, `output_ids` and `meta_info`.

    Args:
        weight_version: the engine's present version, named when no token was sampled.
    """
    ids = sequence.output_ids
    new = len(ids)
    meta: dict[str, Any] = {
        "id": sequence.id,
        "prompt_tokens": sequence.prompt_length,
        "completion_tokens": new,
        "cached_tokens": sequence.cached or 0,
        "finish_reason": None if sequence.finish is None else sequence.finish.as_json(),
        "weight_version": sequence.versions[-1][0] if sequence.versions else weight_version,
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in sequence.versions],
        "num_retractions": sequence.retractions,
    }
    if logprobs:
        meta["output_token_logprobs"] = [(p, t, None) for p, t in zip(sequence.logprobs[:new], ids, strict=True)]
        if sequence.first_logprob >= 0:
            first = sequence.first_logprob
            known: list[float | None] = list(sequence.prompt_logprobs)
            values = [None, *known] if first == 0 else known
            prompt = sequence.tokens[first : sequence.prompt_length].tolist()
            meta["input_token_logprobs"] = [(p, t, None) for p, t in zip(values, prompt, strict=False)]
    return {"text": text, "output_ids": ids, "meta_info": meta}


def add_routes(answer: dict[str, Any], sequence: Sequence, form: str, start: int, num_experts: int) -> None:
    """Put the expert choices of a finished sequence into its answer. Copies megabytes: not for the event loop.

    The rows are those of tokens `start` .. but the last; fewer, and said so, when the sequence ended before they
    were fed.

    Args:
        form: `int32`, `narrow` or `bits` (see `GenerateCall`).
        start: rows before it are left out.
        num_experts: experts per layer.
    """
    meta = answer["meta_info"]
    meta["routed_experts_s"] = sequence.capture_s
    end = min(sequence.length - 1, sequence.routed)
    table = sequence.routes
    ids = np.empty((0, 0, 0), narrowest_dtype(num_experts)) if table is None else table[start : max(end, start)]
    if form == "int32":
        meta["routed_experts"] = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    elif form == "narrow":
        meta["routed_experts_packed"] = {
            "dtype": dtype_name(ids.dtype),
            "shape": list(ids.shape),
            "data": base64.b64encode(np.ascontiguousarray(ids).data).decode(),
        }
    else:
        meta["routed_experts_trace"] = RoutingTrace(expert_ids=ids, num_experts=num_experts)
