"""Promises about requests under way: cache, abort, pause, streams, and what is refused."""

from __future__ import annotations

import asyncio

from miles_contracts import EngineError, GenerateResult, PauseMode, SamplingParams
from miles_rollout.engine.conformance.suite import (
    PROMPT,
    Check,
    PromiseBrokenError,
    Subject,
    free,
    greedy,
    random_prompt,
    require,
    require_refusal,
)
from miles_rollout.engine_identity import EngineKind
from miles_rollout.engine_stream import PartialResult

LONG = 100
"""Tokens of a request that something happens to."""


async def prefixes_are_cached(subject: Subject) -> None:
    """A longer turn finds the shorter one's tokens in the cache, and a flush forgets them."""
    engine = subject.engine
    await engine.flush_cache()
    prompt = random_prompt(48, 0)
    first = await engine.generate(prompt, greedy(4))
    require(first.cached_tokens == 0, f"an empty cache holds {first.cached_tokens} tokens")
    turn = [*prompt, *first.output_ids.tolist(), 5, 6]
    second = await engine.generate(turn, greedy(4))
    require((second.cached_tokens or 0) >= 32, f"only {second.cached_tokens} of {len(turn)} tokens came from the cache")
    await engine.flush_cache()
    third = await engine.generate(turn, greedy(4))
    require(third.cached_tokens == 0, "a flush leaves cached tokens")
    require(third.output_ids.tolist() == second.output_ids.tolist(), "the cache changes the tokens")


async def siblings_share_their_prompt(subject: Subject) -> None:
    """Of requests with one prompt that arrive together, all but one find it in the cache."""
    await subject.engine.flush_cache()
    names = [f"conformance-sibling-{i}" for i in range(6)]
    group = await subject.engine.generate_batch([random_prompt(40, 1)] * 6, [free(4)] * 6, request_ids=names)
    require(sorted(g.cached_tokens or 0 for g in group) == [0] + [39] * 5, "a shared prompt is computed twice")


async def _while_running(subject: Subject, request_id: str) -> asyncio.Task[GenerateResult]:
    """A long request that has begun to sample."""
    started = asyncio.Event()

    async def run() -> GenerateResult:
        stream = subject.engine.generate_stream(PROMPT, greedy(LONG), request_id=request_id)
        async for item in stream:
            started.set()
            if isinstance(item, GenerateResult):
                return item
        raise PromiseBrokenError("a stream without a result")

    task = asyncio.create_task(run())
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task


async def abort_returns_a_part(subject: Subject) -> None:
    """An aborted request ends with `abort` and what it had."""
    whole = (await subject.engine.generate(PROMPT, greedy(LONG))).output_ids.tolist()
    running = await _while_running(subject, "conformance-abort")
    await subject.engine.abort("conformance-abort")
    result = await running
    # An abort that comes too late finds a finished request.
    require(result.finish_reason in ("abort", "length"), f"finish_reason {result.finish_reason}")
    ids = result.output_ids.tolist()
    require(ids == whole[: len(ids)], "an aborted request has other tokens than a whole one")
    require(len(ids) == len(result.logprobs), "ids and log-probs differ in number")
    require(result.finish_reason == "abort" or len(ids) == LONG, "ends with `length` before its length")


async def aborts_are_harmless(subject: Subject) -> None:
    """Aborting a request that does not exist is no error."""
    await subject.engine.abort("conformance-nobody")
    require(await subject.engine.healthy(), "the engine is not healthy after an abort")


async def pauses_keep_requests(subject: Subject) -> None:
    """Retract and in-place pauses change nothing about a request's tokens."""
    want = (await subject.engine.generate(PROMPT, greedy(LONG))).output_ids.tolist()
    for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
        running = await _while_running(subject, f"conformance-pause-{mode}")
        await subject.engine.pause(mode)
        await subject.engine.resume()
        result = await running
        require(result.finish_reason == "length", f"{mode}: finish_reason {result.finish_reason}")
        require(result.output_ids.tolist() == want, f"{mode}: other tokens than without a pause")


async def an_aborting_pause_ends_requests(subject: Subject) -> None:
    """A pause of mode `abort` gives running requests back with what they have."""
    running = await _while_running(subject, "conformance-pause-abort")
    await subject.engine.pause(PauseMode.ABORT)
    try:
        result = await running
    finally:
        await subject.engine.resume()
    require(result.finish_reason in ("abort", "length"), f"finish_reason {result.finish_reason}")
    require(len(result.output_ids) == len(result.logprobs), "ids and log-probs differ in number")


async def a_paused_engine_is_healthy_and_silent(subject: Subject) -> None:
    """While paused it answers that it is well, and a request waits until sampling goes on."""
    engine = subject.engine
    await engine.pause(PauseMode.RETRACT)
    waiting = asyncio.create_task(engine.generate(PROMPT, greedy(4)))
    try:
        require(await engine.healthy(), "a paused engine is not healthy")
        await asyncio.wait({waiting}, timeout=0.3)
        require(not waiting.done(), "a paused engine samples")
    finally:
        await engine.resume()
    require((await waiting).finish_reason == "length", "a request that came during a pause is lost")


async def streams_grow(subject: Subject) -> None:
    """Every partial answer begins like the whole one and is no shorter than the one before; the last is the whole."""
    want = await subject.engine.generate(PROMPT, greedy(24))
    partials: list[list[int]] = []
    final: GenerateResult | None = None
    async for item in subject.engine.generate_stream(PROMPT, greedy(24)):
        if isinstance(item, PartialResult):
            partials.append(item.output_ids.tolist())
        else:
            final = item
    require(bool(partials), "a stream without a partial answer")
    require(final is not None and final.output_ids.tolist() == want.output_ids.tolist(), "a stream has other tokens")
    require(final is not None and len(final.logprobs) == 24, "a stream's result lacks log-probs")
    whole = want.output_ids.tolist()
    for before, after in zip([[], *partials], [*partials, whole], strict=True):
        require(len(after) >= len(before) and after == whole[: len(after)], "a partial answer is not a prefix")


async def bad_requests_are_refused(subject: Subject) -> None:
    """What is wrong with a request is a 4xx with a reason, and the engine lives on."""
    engine = subject.engine
    negative = SamplingParams(max_new_tokens=-3)
    await require_refusal(engine.generate([], greedy(2)), "an empty prompt")
    await require_refusal(engine.generate(PROMPT, negative), "a negative number of tokens")
    unknown = {"input_ids": list(PROMPT), "sampling_params": {"temprature": 1.0}}
    error = await require_refusal(subject.post("/generate", unknown), "an unknown sampling parameter")
    require("temprature" in error.reason, f"the reason does not name the parameter: {error.reason}")
    await require_refusal(subject.post("/update_weights_from_disk", {"model_path": "/nowhere"}), "a missing folder")
    missing = await require_refusal(subject.post("/no_such_call", {}), "an unknown call")
    require(missing.status == 404, f"an unknown call gives {missing}")
    require(await engine.healthy(), "the engine is not healthy after bad requests")


async def too_long_is_cut_or_refused(subject: Subject) -> None:
    """More new tokens than fit are refused (SGLang) or end at the context (embedded); never more than fit."""
    try:
        result = await subject.engine.generate(PROMPT, SamplingParams(max_new_tokens=2**20, temperature=0.0))
    except EngineError as error:
        require(error.status is not None and 400 <= error.status < 500, f"a too long request gives {error}")
    else:
        require(result.finish_reason in ("length", "stop"), f"finish_reason {result.finish_reason}")


async def foreign_ids_are_refused(subject: Subject) -> None:
    """An id outside the vocabulary is refused."""
    await require_refusal(subject.engine.generate([5, 2**30], greedy(2)), "an id outside the vocabulary")


CHECKS: tuple[Check, ...] = (
    Check("prefixes are cached", prefixes_are_cached),
    Check(
        "siblings share their prompt",
        siblings_share_their_prompt,
        differs={EngineKind.SGLANG: "SGLang computes prompts that arrive in one batch side by side"},
    ),
    Check("abort returns a part", abort_returns_a_part),
    Check("aborts are harmless", aborts_are_harmless),
    Check("pauses keep requests", pauses_keep_requests),
    Check("an aborting pause ends requests", an_aborting_pause_ends_requests),
    Check("a paused engine is healthy and silent", a_paused_engine_is_healthy_and_silent),
    Check("streams grow", streams_grow),
    Check("bad requests are refused", bad_requests_are_refused),
    Check("too long is cut or refused", too_long_is_cut_or_refused),
    Check(
        "foreign ids are refused",
        foreign_ids_are_refused,
        differs={EngineKind.SGLANG: "SGLang does not look at input ids; one outside the vocabulary ends its scheduler"},
    ),
)
