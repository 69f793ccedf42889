"""Turns the body of a /generate call into sequences, or says which field is wrong. Pure."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec
import numpy as np

from miles_contracts import InvalidFieldError
from miles_rollout.engine.rng import SEED_LIMIT
from miles_rollout.engine.sequence import Sampling, Sequence
from miles_rollout.engine.text import TextCodec

_SAMPLING_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "sampling_seed": None,
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "n": 1,
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "stop_regex": (None,),
    "logit_bias": (None,),
    "custom_params": (None,),
}
"""SGLang's parameters that the embedded engine does not implement: accepted only at the value that does nothing."""
_NEUTRAL_BODY: dict[str, tuple[Any, ...]] = {
    "model": (None,),
    "log_metrics": (True, None),
    "return_hidden_states": (False, None),
    "background": (False, None),
    "no_logs": (False, None),
    "return_bytes": (False, None),
    "return_entropy": (False, None),
}
"""The same for fields of the call itself: SGLang's router writes all of them into every request."""
_BODY_FIELDS = (
    "rid",
    "text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "return_routed_experts",
    "routed_experts_format",
    "routed_experts_start_len",
    "stream",
)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a request is checked against: facts of the model and the KV cache."""

    context_length: int
    kv_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    has_routes: bool


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """A parsed /generate call.

    Attributes:
        batched: the caller gave lists and gets a list.
        routes: "" for none, `int32` (SGLang's form), `narrow` (the narrowest dtype, declared) or `bits` (packed,
            in a binary answer).
        routes_start: rows before this one are left out of the answer.
    """

    sequences: list[Sequence]
    batched: bool
    logprobs: bool
    routes: str
    routes_start: int
    stream: bool


def parse_generate(body: Any, limits: RequestLimits, codec: TextCodec, fresh_seed: Callable[[], int]) -> GenerateCall:
    """Check every field of `body`.

    Raises:
        InvalidFieldError: names the field, the value and the remedy.
    """
    if not isinstance(body, dict):
        raise InvalidFieldError("body", type(body).__name__, "send a JSON object")
    _require_neutral(body, _NEUTRAL_BODY, "")
    _refuse_unknown(body, (*_BODY_FIELDS, *_NEUTRAL_BODY), "")
    prompts, batched = _prompts(body, codec)
    count = len(prompts)
    params = body.get("sampling_params")
    per_prompt = params if isinstance(params, list) else [params] * count
    if len(per_prompt) != count:
        raise InvalidFieldError(
            "sampling_params", f"{len(per_prompt)} entries", f"give one for each of {count} prompts"
        )
    rids = _request_ids(body.get("rid"), count, batched)
    logprobs = _flag(body, "return_logprob")
    if body.get("top_logprobs_num") not in (None, 0):
        raise InvalidFieldError("top_logprobs_num", body["top_logprobs_num"], "only 0 is supported")
    start = body.get("logprob_start_len", -1)
    if start is None:
        start = -1
    _require_int("logprob_start_len", start, -1, limits.context_length)
    stream = _flag(body, "stream")
    routes = _routes(body, limits, stream)
    routes_start = 0 if body.get("routed_experts_start_len") is None else body["routed_experts_start_len"]
    _require_int("routed_experts_start_len", routes_start, 0, min(map(len, prompts)))
    if stream and batched and routes:
        raise InvalidFieldError("return_routed_experts", True, "ask for them with one prompt a stream, or no stream")
    sequences = []
    for index, (prompt, given, rid) in enumerate(zip(prompts, per_prompt, rids, strict=True)):
        where = f"[{index}]" if batched else ""
        _check_prompt(prompt, limits, where)
        sampling = parse_sampling(given, len(prompt), limits, codec, fresh_seed, where)
        tokens = np.zeros(len(prompt) + sampling.max_new_tokens, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        sequences.append(
            Sequence(
                id=rid,
                tokens=tokens,
                prompt_length=len(prompt),
                sampling=sampling,
                stream=stream and not batched,
                first_logprob=start if logprobs and 0 <= start < len(prompt) else -1,
            )
        )
    return GenerateCall(
        sequences=sequences,
        batched=batched,
        logprobs=logprobs,
        routes=routes,
        routes_start=routes_start,
        stream=stream,
    )


def parse_sampling(
    given: Any,
    prompt_length: int,
    limits: RequestLimits,
    codec: TextCodec,
    fresh_seed: Callable[[], int],
    where: str = "",
) -> Sampling:
    """One request's `sampling_params`; `max_new_tokens` is clamped to what context and KV cache leave."""
    at = f"sampling_params{where}"
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise InvalidFieldError(at, type(given).__name__, "give an object")
    _require_neutral(given, _NEUTRAL, f"{at}.")
    _refuse_unknown(given, (*_SAMPLING_DEFAULTS, *_NEUTRAL), f"{at}.")
    value = {**_SAMPLING_DEFAULTS, **{k: v for k, v in given.items() if k not in _NEUTRAL}}
    if value["n"] != 1:
        raise InvalidFieldError(f"{at}.n", value["n"], "send the prompt n times; shared prefixes are computed once")
    max_new = 128 if value["max_new_tokens"] is None else value["max_new_tokens"]
    _require_int(f"{at}.max_new_tokens", max_new, 0, None)
    temperature = _require_number(f"{at}.temperature", value["temperature"], 0.0, None)
    top_p = _require_number(f"{at}.top_p", value["top_p"], 0.0, 1.0)
    if top_p == 0:
        raise InvalidFieldError(f"{at}.top_p", top_p, "use a value in (0, 1]; for greedy decoding temperature 0")
    min_p = _require_number(f"{at}.min_p", value["min_p"], 0.0, 1.0)
    top_k = value["top_k"]
    _require_int(f"{at}.top_k", top_k, -1, None)
    if top_k == 0:
        raise InvalidFieldError(f"{at}.top_k", top_k, "use -1 (off) or a value >= 1")
    seed = value["sampling_seed"]
    if seed is None:
        seed = fresh_seed()
    _require_int(f"{at}.sampling_seed", seed, 0, SEED_LIMIT - 1)
    stop_ids = _stop_ids(value["stop_token_ids"], at, limits.vocab_size)
    # As in SGLang, ignore_eos stands for all stop tokens, the caller's included; stop strings still end a request.
    stop_ids = frozenset() if _boolean(f"{at}.ignore_eos", value["ignore_eos"]) else stop_ids | limits.eos_ids
    room = min(limits.context_length - prompt_length, limits.kv_tokens - prompt_length + 1)
    return Sampling(
        max_new_tokens=min(max_new, room),
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        stop=_stop_strings(value["stop"], at, codec),
        stop_ids=stop_ids,
        no_stop_trim=_boolean(f"{at}.no_stop_trim", value["no_stop_trim"]),
        skip_special_tokens=_boolean(f"{at}.skip_special_tokens", value["skip_special_tokens"]),
    )


def _prompts(body: dict[str, Any], codec: TextCodec) -> tuple[list[list[int]], bool]:
    """Token ids of all prompts, and whether they came as a list."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise InvalidFieldError("input_ids", "both" if ids is not None else None, "give either input_ids or text")
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise InvalidFieldError("text", text, "give a string or a list of strings")
        codec.require("text")
        return [codec.encode(t) for t in texts], isinstance(text, list)
    if not isinstance(ids, list):
        raise InvalidFieldError("input_ids", type(ids).__name__, "give a list of token ids, or a list of such lists")
    if not ids:
        raise InvalidFieldError("input_ids", [], "give at least one token")
    batched = isinstance(ids[0], list)
    try:
        lists = msgspec.convert(ids if batched else [ids], list[list[int]], strict=True)
    except msgspec.ValidationError as error:
        raise InvalidFieldError(
            "input_ids", str(error), "token ids are integers, in one list or a list of lists"
        ) from error
    return lists, batched


def _check_prompt(prompt: list[int], limits: RequestLimits, where: str) -> None:
    name = f"input_ids{where}"
    if not prompt:
        raise InvalidFieldError(name, [], "give at least one token")
    room = min(limits.context_length - 1, limits.kv_tokens)
    if len(prompt) > room:
        what = f"the context holds {limits.context_length} tokens and the KV cache {limits.kv_tokens}"
        raise InvalidFieldError(name, f"{len(prompt)} tokens", f"use at most {room}: {what}")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise InvalidFieldError(name, bad, f"token ids are in [0, {limits.vocab_size})")


def _request_ids(rid: Any, count: int, batched: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = rid if isinstance(rid, list) else [rid] if not batched else [f"{rid}_{i}" for i in range(count)]
    if len(rids) != count or len(set(rids)) != count or not all(isinstance(r, str) and r for r in rids):
        raise InvalidFieldError("rid", rid, f"give {count} different non-empty string(s)")
    return list(rids)


def _routes(body: dict[str, Any], limits: RequestLimits, stream: bool) -> str:
    if not _flag(body, "return_routed_experts"):
        return ""
    if not limits.has_routes:
        raise InvalidFieldError("return_routed_experts", True, "this model has no mixture-of-experts layers")
    form = body.get("routed_experts_format") or "int32"
    if form not in ("int32", "narrow", "bits"):
        raise InvalidFieldError("routed_experts_format", form, "use int32, narrow or bits")
    if form == "bits" and stream:
        raise InvalidFieldError("routed_experts_format", form, "a stream of events is text; use narrow")
    return str(form)


def _stop_strings(value: Any, at: str, codec: TextCodec) -> tuple[str, ...]:
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(s, str) and s for s in stops):
        raise InvalidFieldError(f"{at}.stop", value, "give non-empty strings")
    if stops:
        codec.require(f"{at}.stop")
    return tuple(stops)


def _stop_ids(value: Any, at: str, vocab_size: int) -> frozenset[int]:
    ids = value if value is not None else []
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise InvalidFieldError(f"{at}.stop_token_ids", value, f"give a list of ids in [0, {vocab_size})")
    return frozenset(ids)


def _require_neutral(given: dict[str, Any], table: dict[str, tuple[Any, ...]], prefix: str) -> None:
    for name, neutral in table.items():
        if name in given and given[name] not in neutral:
            raise InvalidFieldError(f"{prefix}{name}", given[name], f"the embedded engine supports only {neutral[0]!r}")


def _refuse_unknown(given: dict[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise InvalidFieldError(f"{prefix}{name}", given[name], f"it is not a parameter; {hint}")


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    return False if value is None else _boolean(name, value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidFieldError(name, value, "use true or false")
    return value


def _require_int(name: str, value: Any, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        span = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidFieldError(name, value, f"use an integer {span}")


def _require_number(name: str, value: Any, low: float, high: float | None) -> float:
    fits = type(value) in (int, float) and math.isfinite(value) and value >= low and (high is None or value <= high)
    if not fits:
        span = f">= {low:g}" if high is None else f"in [{low:g}, {high:g}]"
        raise InvalidFieldError(name, value, f"use a finite number {span}")
    return float(value)
