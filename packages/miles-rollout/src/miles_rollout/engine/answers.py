"""Builds the JSON answer of /generate from a sequence, in SGLang's form. Pure."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from miles_rollout.engine.routes import dtype_name
from miles_rollout.engine.sequence import Sequence


def generate_answer(
    sequence: Sequence, text: str, *, logprobs: bool, routes: str, weight_version: str
) -> dict[str, Any]:
    """One answer: `text`, `output_ids` and `meta_info`.

    Args:
        routes: "" for none, `int32` or `narrow` (see `GenerateCall`).
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
    if routes:
        meta.update(_routes(sequence, routes))
    return {"text": text, "output_ids": ids, "meta_info": meta}


def _routes(sequence: Sequence, form: str) -> dict[str, Any]:
    """Rows of all tokens but the last; fewer, and said so, when the sequence ended before they were fed."""
    rows = sequence.length - 1
    table = sequence.routes
    ids = np.empty((0, 0, 0), dtype=np.uint8) if table is None else table[: min(rows, sequence.routed)]
    if form == "int32":
        return {"routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode()}
    packed = {
        "dtype": dtype_name(ids.dtype),
        "shape": list(ids.shape),
        "data": base64.b64encode(np.ascontiguousarray(ids).data).decode(),
    }
    return {"routed_experts_packed": packed}
