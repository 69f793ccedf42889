"""Promises about what is sampled: lengths, log-probs, temperature, stops, seeds."""

from __future__ import annotations

import asyncio
import math

import numpy as np

from miles_contracts import SamplingParams
from miles_rollout.engine.conformance.suite import (
    PROMPT,
    TOLERANCE,
    Check,
    Subject,
    free,
    greedy,
    random_prompt,
    require,
)


async def length_ends_a_request(subject: Subject) -> None:
    """`max_new_tokens` tokens, as many log-probs, all finite and <= 0, spans over all of them."""
    result = await subject.engine.generate(PROMPT, free(9))
    require(result.finish_reason == "length", f"finish_reason {result.finish_reason}")
    require(len(result.output_ids) == len(result.logprobs) == 9, "not nine tokens with nine log-probs")
    require(bool(np.isfinite(result.logprobs).all() and (result.logprobs <= 1e-6).all()), "log-probs not in (-inf, 0]")
    require(result.version_spans[0].start == 0 and result.version_spans[-1].end == 9, "spans do not cover")


async def greedy_repeats(subject: Subject) -> None:
    """Temperature 0 gives the same tokens every time, alone and in company."""
    engine = subject.engine
    first = await engine.generate(PROMPT, greedy(12))
    company = [engine.generate([7 + i, 8, 9], free(12)) for i in range(4)]
    again, *_ = await asyncio.gather(engine.generate(PROMPT, greedy(12)), *company)
    require(again.output_ids.tolist() == first.output_ids.tolist(), "greedy decoding is not repeatable")


async def greedy_is_the_likeliest(subject: Subject) -> None:
    """No sampled first token is likelier than the greedy one."""
    engine = subject.engine
    best = await engine.generate(PROMPT, greedy(1))
    others = await asyncio.gather(*(engine.generate(PROMPT, free(1)) for _ in range(16)))
    require(max(float(o.logprobs[0]) for o in others) <= float(best.logprobs[0]) + TOLERANCE, "greedy is not the best")


async def temperature_scales_logits(subject: Subject) -> None:
    """Log-probs are those of softmax(logits / T): the odds of two tokens at T are their odds at 1, divided by T."""
    cold, warm = await _first_tokens(subject, 1.0), await _first_tokens(subject, 2.0)
    both = sorted(cold.keys() & warm.keys())
    require(len(both) >= 2, "too few tokens in common to compare")
    a, b = both[0], both[-1]
    odds = (cold[a] - cold[b]) / 2.0
    require(math.isclose(warm[a] - warm[b], odds, abs_tol=10 * TOLERANCE), "log-probs do not follow the temperature")


async def _first_tokens(subject: Subject, temperature: float) -> dict[int, float]:
    # Only the likeliest tokens are drawn, so that two temperatures see the same ones.
    params = free(1, temperature=temperature, top_k=3)
    results = await asyncio.gather(*(subject.engine.generate(PROMPT, params) for _ in range(32)))
    return {int(r.output_ids[0]): float(r.logprobs[0]) for r in results}


async def truncation_leaves_logprobs_alone(subject: Subject) -> None:
    """With top_k 1 the log-prob is still that of the full distribution, not 0."""
    engine = subject.engine
    cut, whole = await asyncio.gather(engine.generate(PROMPT, free(1, top_k=1)), engine.generate(PROMPT, greedy(1)))
    require(int(cut.output_ids[0]) == int(whole.output_ids[0]), "top_k 1 is not greedy")
    require(abs(float(cut.logprobs[0] - whole.logprobs[0])) < TOLERANCE, "truncation changes the log-probs")


async def a_stop_token_ends_and_is_returned(subject: Subject) -> None:
    """The matched stop token is the last of `output_ids`."""
    plain = SamplingParams(max_new_tokens=8, temperature=0.0)
    ids = (await subject.engine.generate(PROMPT, plain)).output_ids.tolist()
    stop = ids[min(3, len(ids) - 1)]
    params = SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=(stop,))
    result = await subject.engine.generate(PROMPT, params)
    require(result.finish_reason == "stop", f"finish_reason {result.finish_reason}")
    require(result.output_ids.tolist() == ids[: ids.index(stop) + 1], "does not end with the stop token")


async def ignore_eos_ignores_all_stop_tokens(subject: Subject) -> None:
    """With `ignore_eos` the caller's stop tokens do not end a request either: only its length does."""
    ids = (await subject.engine.generate(PROMPT, greedy(8))).output_ids.tolist()
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(ids[3],))
    result = await subject.engine.generate(PROMPT, params)
    require(result.finish_reason == "length", f"finish_reason {result.finish_reason}")
    require(result.output_ids.tolist() == ids, "other tokens than without stop tokens")


async def seeds_decide(subject: Subject) -> None:
    """The same seed gives the same tokens in any company; requests without one differ."""
    seeded = free(16, seed=11)
    params = (seeded, free(16), seeded, free(16))
    results = await asyncio.gather(*(subject.engine.generate(PROMPT, p) for p in params))
    outputs = [r.output_ids.tolist() for r in results]
    require(outputs[0] == outputs[2], "one seed, two outputs")
    require(outputs[1] != outputs[3], "requests without a seed repeat each other")


def _unseeded(subject: Subject) -> str | None:
    remedy = "SGLang heeds sampling_seed only with --enable-deterministic-inference, which its CPU attention lacks"
    return None if subject.identity.seeded else remedy


async def requests_without_a_seed_differ(subject: Subject) -> None:
    """Two requests that name no seed are two draws."""
    results = await asyncio.gather(*(subject.engine.generate(PROMPT, free(16)) for _ in range(2)))
    require(results[0].output_ids.tolist() != results[1].output_ids.tolist(), "two draws are the same")


async def a_batch_keeps_its_order(subject: Subject) -> None:
    """One call with several prompts answers in their order, as single calls would."""
    prompts = [random_prompt(5 + i, 100 + i) for i in range(4)]
    batch = await subject.engine.generate_batch(
        prompts, [greedy(3 + i) for i in range(4)], request_ids=[f"conformance-batch-{i}" for i in range(4)]
    )
    for i, (prompt, result) in enumerate(zip(prompts, batch, strict=True)):
        alone = await subject.engine.generate(prompt, greedy(3 + i))
        require(result.output_ids.tolist() == alone.output_ids.tolist(), f"prompt {i} of a batch has other tokens")
        require(result.request_id == f"conformance-batch-{i}", f"prompt {i} has the name {result.request_id}")


CHECKS: tuple[Check, ...] = (
    Check("length ends a request", length_ends_a_request),
    Check("greedy repeats", greedy_repeats),
    Check("greedy is the likeliest", greedy_is_the_likeliest),
    Check("temperature scales logits", temperature_scales_logits),
    Check("truncation leaves log-probs alone", truncation_leaves_logprobs_alone),
    Check("a stop token ends and is returned", a_stop_token_ends_and_is_returned),
    Check("ignore_eos ignores all stop tokens", ignore_eos_ignores_all_stop_tokens),
    Check("seeds decide", seeds_decide, needs=_unseeded),
    Check("requests without a seed differ", requests_without_a_seed_differ),
    Check("a batch keeps its order", a_batch_keeps_its_order),
)
