"""Promises about the expert choices of a mixture-of-experts model."""

from __future__ import annotations

import numpy as np

from miles_contracts import EngineError
from miles_rollout.engine.conformance.suite import (
    PROMPT,
    Check,
    PromiseBrokenError,
    Subject,
    greedy,
    random_prompt,
    require,
)


def _dense(subject: Subject) -> str | None:
    return "its model is dense" if subject.experts is None else None


def _mixture(subject: Subject) -> str | None:
    return "its model is a mixture of experts" if subject.experts is not None else None


async def every_fed_token_has_its_experts(subject: Subject) -> None:
    """One row for every token but the last, each with `top_k` different experts in every layer."""
    assert subject.experts is not None
    result = await subject.engine.generate(PROMPT, greedy(6), routing=True)
    rows = np.asarray(result.routing)
    require(rows.ndim == 3 and len(rows) == len(PROMPT) + 5, f"routed experts of shape {rows.shape}")
    require(subject.top_k in (None, rows.shape[2]), f"{rows.shape[2]} experts a token")
    require(bool((rows < subject.experts).all()), f"an expert beyond {subject.experts - 1}")
    ordered = np.sort(rows.astype(np.int64), axis=2)
    require(bool((np.diff(ordered, axis=2) > 0).all()), "a token has one expert twice")


async def the_cache_keeps_the_experts(subject: Subject) -> None:
    """Tokens that come from the prefix cache have the experts that they were computed with."""
    engine = subject.engine
    await engine.flush_cache()
    prompt = random_prompt(40, 2)
    fresh = await engine.generate(prompt, greedy(4), routing=True)
    cached = await engine.generate(prompt, greedy(4), routing=True)
    require((cached.cached_tokens or 0) > 0, "the prompt did not come from the cache")
    require(np.array_equal(fresh.routing, cached.routing), "cached tokens have other experts")


async def only_the_wanted_experts_are_sent(subject: Subject) -> None:
    """A later turn of a session gets the rows of the tokens it fed, not those of the whole history again."""
    whole = await subject.engine.generate(PROMPT, greedy(6), routing=True)
    for start in (1, len(PROMPT) - 1, len(PROMPT)):
        part = await subject.engine.generate(PROMPT, greedy(6), routing=True, routing_start=start)
        require(np.array_equal(part.routing, whole.routing[start:]), f"other experts from token {start} on")


async def a_dense_model_has_no_experts(subject: Subject) -> None:
    """Asking a dense model for experts is an error, not an empty answer."""
    try:
        await subject.engine.generate(PROMPT, greedy(2), routing=True)
    except EngineError:
        return
    raise PromiseBrokenError("a dense model names experts")


CHECKS: tuple[Check, ...] = (
    Check("every fed token has its experts", every_fed_token_has_its_experts, needs=_dense),
    Check("the cache keeps the experts", the_cache_keeps_the_experts, needs=_dense),
    Check("only the wanted experts are sent", only_the_wanted_experts_are_sent, needs=_dense),
    Check("a dense model has no experts", a_dense_model_has_no_experts, needs=_mixture),
)
