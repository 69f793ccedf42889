"""What Miles relies on in an engine, as checks that run against any URL: the embedded engine or SGLang.

    python -m miles_rollout.engine.conformance http://127.0.0.1:30000

Each check is one promise of the HTTP boundary. Checks that only the embedded engine can pass (calls that SGLang
does not have) are marked and skipped elsewhere. Needs no torch.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_contracts import EngineError, GenerateResult, PauseMode, SamplingParams
from miles_rollout.engine_client import EngineClient

PROMPT = (5, 6, 7, 8, 9, 10, 11)
"""Small ids, so that every vocabulary has them."""
TOLERANCE = 1e-3
"""Nats between two passes over the same tokens in float32; a wrong convention (temperature, truncation) is far off."""


@dataclass(frozen=True)
class Check:
    """One promise. `embedded_only`: needs a call or field that SGLang lacks."""

    name: str
    run: Callable[[EngineClient], Awaitable[None]]
    embedded_only: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a check; `failure` is None when the promise holds, `skipped` when it does not apply."""

    name: str
    failure: str | None
    skipped: bool = False


class PromiseBrokenError(Exception):
    """An engine does not do what Miles relies on."""


def require(condition: bool, what: str) -> None:
    """Raise PromiseBrokenError unless the condition holds."""
    if not condition:
        raise PromiseBrokenError(what)


def greedy(new: int) -> SamplingParams:
    """Deterministic decoding that only the length ends."""
    return SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)


def free(new: int, **fields: Any) -> SamplingParams:
    """Sampling at temperature 1 that only the length ends."""
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **fields)


async def length_ends_a_request(engine: EngineClient) -> None:
    """`max_new_tokens` tokens, as many log-probs, all finite and <= 0, spans over all of them."""
    result = await engine.generate(PROMPT, free(9))
    require(result.finish_reason == "length", f"finish_reason {result.finish_reason}")
    require(len(result.output_ids) == len(result.logprobs) == 9, "not nine tokens with nine log-probs")
    require(bool(np.isfinite(result.logprobs).all() and (result.logprobs <= 1e-6).all()), "log-probs not in (-inf, 0]")
    require(result.version_spans[0].start == 0 and result.version_spans[-1].end == 9, "spans do not cover")


async def greedy_repeats(engine: EngineClient) -> None:
    """Temperature 0 gives the same tokens every time, alone and in company."""
    first = await engine.generate(PROMPT, greedy(12))
    company = [engine.generate([7 + i, 8, 9], free(12)) for i in range(4)]
    again, *_ = await asyncio.gather(engine.generate(PROMPT, greedy(12)), *company)
    require(again.output_ids.tolist() == first.output_ids.tolist(), "greedy decoding is not repeatable")


async def greedy_is_the_likeliest(engine: EngineClient) -> None:
    """No sampled first token is likelier than the greedy one."""
    best = await engine.generate(PROMPT, greedy(1))
    others = await asyncio.gather(*(engine.generate(PROMPT, free(1)) for _ in range(16)))
    require(max(float(o.logprobs[0]) for o in others) <= float(best.logprobs[0]) + TOLERANCE, "greedy is not the best")


async def temperature_scales_logits(engine: EngineClient) -> None:
    """Log-probs are those of softmax(logits / T): the odds of two tokens at T are their odds at 1, divided by T."""
    cold, warm = await _first_tokens(engine, 1.0), await _first_tokens(engine, 2.0)
    both = sorted(cold.keys() & warm.keys())
    require(len(both) >= 2, "too few tokens in common to compare")
    a, b = both[0], both[-1]
    odds = (cold[a] - cold[b]) / 2.0
    require(math.isclose(warm[a] - warm[b], odds, abs_tol=10 * TOLERANCE), "log-probs do not follow the temperature")


async def _first_tokens(engine: EngineClient, temperature: float) -> dict[int, float]:
    # Only the likeliest tokens are drawn, so that two temperatures see the same ones.
    params = free(1, temperature=temperature, top_k=3)
    results = await asyncio.gather(*(engine.generate(PROMPT, params) for _ in range(32)))
    return {int(r.output_ids[0]): float(r.logprobs[0]) for r in results}


async def truncation_leaves_logprobs_alone(engine: EngineClient) -> None:
    """With top_k 1 the log-prob is still that of the full distribution, not 0."""
    cut, whole = await asyncio.gather(engine.generate(PROMPT, free(1, top_k=1)), engine.generate(PROMPT, greedy(1)))
    require(int(cut.output_ids[0]) == int(whole.output_ids[0]), "top_k 1 is not greedy")
    require(abs(float(cut.logprobs[0] - whole.logprobs[0])) < TOLERANCE, "truncation changes the log-probs")


async def a_stop_token_ends_and_is_returned(engine: EngineClient) -> None:
    """The matched stop token is the last of `output_ids`."""
    ids = (await engine.generate(PROMPT, greedy(8))).output_ids.tolist()
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(ids[3],))
    result = await engine.generate(PROMPT, params)
    require(result.finish_reason == "stop", f"finish_reason {result.finish_reason}")
    require(result.output_ids.tolist() == ids[: ids.index(ids[3]) + 1], "does not end with the stop token")


async def prefixes_are_cached(engine: EngineClient) -> None:
    """A longer turn finds the shorter one's tokens in the cache, and a flush forgets them."""
    await engine.flush_cache()
    prompt = [int(i) for i in np.random.default_rng(0).integers(3, 90, size=48)]
    first = await engine.generate(prompt, greedy(4))
    turn = [*prompt, *first.output_ids.tolist(), 5, 6]
    second = await engine.generate(turn, greedy(4))
    require((second.cached_tokens or 0) >= 32, f"only {second.cached_tokens} of {len(turn)} tokens came from the cache")
    await engine.flush_cache()
    third = await engine.generate(turn, greedy(4))
    require(not third.cached_tokens, "a flush leaves cached tokens")
    require(third.output_ids.tolist() == second.output_ids.tolist(), "the cache changes the tokens")


async def abort_returns_a_part(engine: EngineClient) -> None:
    """An aborted request ends with `abort` and what it had."""
    running = asyncio.create_task(engine.generate(PROMPT, free(200), request_id="conformance-abort"))
    await asyncio.sleep(0.05)
    await engine.abort("conformance-abort")
    result = await running
    require(result.finish_reason in ("abort", "length"), f"finish_reason {result.finish_reason}")
    require(len(result.output_ids) == len(result.logprobs), "ids and log-probs differ in number")


async def _paused(engine: EngineClient, mode: PauseMode) -> GenerateResult:
    running = asyncio.create_task(engine.generate(PROMPT, greedy(100)))
    await asyncio.sleep(0.05)
    await engine.pause(mode)
    await asyncio.sleep(0.05)
    await engine.resume()
    return await running


async def pauses_keep_requests(engine: EngineClient) -> None:
    """Retract and in-place pauses change nothing about a request's tokens."""
    want = (await engine.generate(PROMPT, greedy(100))).output_ids.tolist()
    for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
        result = await _paused(engine, mode)
        require(result.finish_reason == "length", f"{mode}: finish_reason {result.finish_reason}")
        require(result.output_ids.tolist() == want, f"{mode}: other tokens than without a pause")


async def bad_requests_are_refused(engine: EngineClient) -> None:
    """An empty prompt is a 4xx, and the engine lives on."""
    try:
        await engine.generate([], greedy(2))
    except EngineError as error:
        require(error.status is not None and 400 <= error.status < 500, f"an empty prompt gives {error}")
    else:
        raise PromiseBrokenError("an empty prompt is accepted")
    require(await engine.healthy(), "the engine is not healthy after a bad request")


async def seeds_decide(engine: EngineClient) -> None:
    """The same seed gives the same tokens in any company; requests without one differ."""
    seeded = free(16, seed=11)
    results = await asyncio.gather(*(engine.generate(PROMPT, p) for p in (seeded, free(16), seeded, free(16))))
    outputs = [r.output_ids.tolist() for r in results]
    require(outputs[0] == outputs[2], "one seed, two outputs")
    require(outputs[1] != outputs[3], "requests without a seed repeat each other")


async def siblings_share_their_prompt(engine: EngineClient) -> None:
    """Of requests with one prompt that arrive together, all but one find it in the cache."""
    await engine.flush_cache()
    prompt = [int(i) for i in np.random.default_rng(1).integers(3, 90, size=40)]
    group = await asyncio.gather(*(engine.generate(prompt, free(4)) for _ in range(6)))
    require(sorted(g.cached_tokens or 0 for g in group) == [0] + [39] * 5, "a shared prompt is computed twice")


async def unknown_updates_are_refused(engine: EngineClient) -> None:
    """A commit of an update that never began fails; its rollback is harmless."""
    await engine.rollback_weight_update("conformance-unknown")
    try:
        await engine.commit_weight_update("conformance-unknown")
    except EngineError:
        return
    raise PromiseBrokenError("the commit of an unknown update succeeds")


CHECKS: tuple[Check, ...] = (
    Check("length ends a request", length_ends_a_request),
    Check("greedy repeats", greedy_repeats),
    Check("greedy is the likeliest", greedy_is_the_likeliest),
    Check("temperature scales logits", temperature_scales_logits),
    Check("truncation leaves log-probs alone", truncation_leaves_logprobs_alone),
    Check("a stop token ends and is returned", a_stop_token_ends_and_is_returned),
    Check("prefixes are cached", prefixes_are_cached),
    Check("abort returns a part", abort_returns_a_part),
    Check("pauses keep requests", pauses_keep_requests),
    Check("bad requests are refused", bad_requests_are_refused),
    Check("seeds decide", seeds_decide, embedded_only=True),
    Check("siblings share their prompt", siblings_share_their_prompt, embedded_only=True),
    Check("unknown updates are refused", unknown_updates_are_refused, embedded_only=True),
)


async def run_check(check: Check, engine: EngineClient) -> Outcome:
    """Run one check; skipped when the engine is not the embedded one and the check needs it."""
    if check.embedded_only and (await engine.server_info()).get("engine") != "miles":
        return Outcome(check.name, None, skipped=True)
    try:
        await check.run(engine)
    except (PromiseBrokenError, EngineError) as error:
        return Outcome(check.name, str(error))
    return Outcome(check.name, None)


async def run_all(url: str) -> list[Outcome]:
    """All checks against one engine, one after the other."""
    async with EngineClient(url) as engine:
        return [await run_check(check, engine) for check in CHECKS]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a check; 1 when a promise is broken."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: python -m miles_rollout.engine.conformance URL", file=sys.stderr)  # noqa: T201 (a command)
        return 2
    outcomes = asyncio.run(run_all(arguments[0]))
    for outcome in outcomes:
        verdict = "skipped" if outcome.skipped else f"FAILED: {outcome.failure}" if outcome.failure else "ok"
        print(f"{outcome.name}: {verdict}")  # noqa: T201
    return 1 if any(o.failure for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
