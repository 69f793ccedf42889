"""What a promise is, and how promises are checked against a running engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles_contracts import DeadlineExceededError, EngineError, SamplingParams
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.engine_http import EngineHttp
from miles_rollout.engine_identity import EngineIdentity, EngineKind

PROMPT = (5, 6, 7, 8, 9, 10, 11)
"""Small ids, so that every vocabulary has them."""
TOLERANCE = 1e-3
"""Nats between two passes over the same tokens in float32; a wrong convention (temperature, truncation) is far off."""
CALL_S = 600.0
"""Deadline of one call; the first one of a fresh server may compile for a while on a busy machine."""


@dataclass(frozen=True)
class Subject:
    """The engine under test, and what the tester knows about it.

    Attributes:
        engine: client of it.
        http: for calls that the client would not make.
        identity: what it says it is.
        weights: two Hugging Face folders of its model with different weights, which it can read and which this
            process can; None leaves the checks of weight updates out.
        experts: experts per layer of its model; None for a dense one.
        top_k: experts that a token uses.
    """

    engine: EngineClient
    http: EngineHttp
    identity: EngineIdentity
    weights: tuple[Path, Path] | None = None
    experts: int | None = None
    top_k: int | None = None

    async def post(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """A call as it is, its answer as it is."""
        return await self.http.call("POST", path, body, path, CALL_S)


@dataclass(frozen=True)
class Check:
    """One promise.

    Attributes:
        name: the promise in words.
        run: raises `PromiseBrokenError` when it is broken.
        differs: engines that are known not to keep it, each with the reason.
        needs: what is missing from the subject for this check, in words, or None when nothing is.
    """

    name: str
    run: Callable[[Subject], Awaitable[None]]
    differs: Mapping[EngineKind, str] = field(default_factory=dict)
    needs: Callable[[Subject], str | None] = lambda _: None


@dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        failure: None when the promise holds or was not checked.
        skipped: why it was not checked, None when it was.
    """

    name: str
    failure: str | None = None
    skipped: str | None = None


class PromiseBrokenError(Exception):
    """An engine does not do what Miles relies on."""


def require(condition: bool, what: str) -> None:
    """Raise PromiseBrokenError unless the condition holds."""
    if not condition:
        raise PromiseBrokenError(what)


async def require_refusal(call: Awaitable[Any], what: str) -> EngineError:
    """The refusal of a call; PromiseBrokenError when it is accepted, or when the fault is not the caller's (4xx)."""
    try:
        await call
    except EngineError as error:
        require(error.status is not None and 400 <= error.status < 500, f"{what} gives {error}")
        require(error.reason not in ("", "no reason given"), f"{what} is refused without a reason")
        return error
    raise PromiseBrokenError(f"{what} is accepted")


def greedy(new: int) -> SamplingParams:
    """Deterministic decoding that only the length ends."""
    return SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)


def free(new: int, **fields: Any) -> SamplingParams:
    """Sampling at temperature 1 that only the length ends."""
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **fields)


def random_prompt(length: int, seed: int) -> list[int]:
    """Ids that every vocabulary has, and no other check uses in this order."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, 90, size=length)]


async def run_check(check: Check, subject: Subject) -> Outcome:
    """Run one check, unless the engine is known to differ or the subject lacks what it needs."""
    reason = check.differs.get(subject.identity.kind) or check.needs(subject)
    if reason is not None:
        return Outcome(check.name, skipped=reason)
    try:
        await check.run(subject)
    except (PromiseBrokenError, EngineError, DeadlineExceededError) as error:
        return Outcome(check.name, failure=str(error))
    return Outcome(check.name)


async def run_checks(
    url: str,
    checks: Sequence[Check],
    *,
    weights: tuple[Path, Path] | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
) -> list[Outcome]:
    """Checks against one engine, one after the other.

    Args:
        url: of the engine.
        checks: which.
        weights, experts, top_k: see `Subject`.
        layers: decoder layers of a mixture-of-experts model.
    """
    deadlines = Deadlines(generate=CALL_S, control=CALL_S, weights=CALL_S)
    async with EngineClient(url, deadlines=deadlines, routing_layers=layers) as engine:
        http = EngineHttp(url, deadlines.connect)
        try:
            subject = Subject(engine, http, await engine.identify(), weights, experts, top_k)
            return [await run_check(check, subject) for check in checks]
        finally:
            await http.close()
