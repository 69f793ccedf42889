"""Probes that tell whether an engine really samples from the new weights; no torch needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from miles_contracts import Engine, InvalidFieldError, SamplingParams, WeightUpdateError


class Expect(StrEnum):
    """What an update does to the probes' log-probs."""

    CHANGE = "change"
    """Some log-prob moves: an optimiser step with a real gradient."""
    SAME = "same"
    """None moves beyond the tolerance: weights that are sent again."""
    ANYTHING = "anything"
    """Only that engines answer, finitely and alike."""


class LogprobCanary:
    """Greedy probes before the pause and after the commit.

    After the commit each engine has to report finite log-probs, that changed as expected against the same engine's
    before, and that agree with those of the engine that answered first.

    Args:
        prompts: token ids, a few short ones; at least one.
        expect: what the update does.
        tolerance: nats within which two log-probs are the same; numerics of batching, not of weights.
        new_tokens: sampled per probe.

    Raises:
        InvalidFieldError: no prompts, an empty one, or a negative tolerance.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        expect: Expect = Expect.CHANGE,
        tolerance: float = 1e-3,
        new_tokens: int = 4,
    ) -> None:
        if not prompts or not all(prompts):
            raise InvalidFieldError("prompts", list(prompts), "give at least one prompt, none of them empty")
        if not tolerance >= 0:
            raise InvalidFieldError("tolerance", tolerance, "give a number of nats >= 0")
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._expect, self._tolerance = expect, tolerance
        self._params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, top_k=1, ignore_eos=True)
        self._before: dict[str, list[tuple[int, float]]] = {}
        self._reference: tuple[str, list[tuple[int, float]]] | None = None

    async def prepare(self, engine: Engine) -> None:
        """Remember what the engine answers now, when that is to be compared; a paused engine could not answer."""
        self._reference = None
        if self._expect is not Expect.ANYTHING:
            self._before[engine.url] = await self._probe(engine)

    async def check(self, engine: Engine) -> None:
        """Compare with what it answers now.

        Raises:
            WeightUpdateError: a log-prob is not finite, did not change as expected, or differs between engines.
        """
        after = await self._probe(engine)
        if not all(math.isfinite(logprob) for _, logprob in after):
            raise WeightUpdateError("the canary's log-probs are not finite", engine=engine.url)
        moved = self._distance(self._before.get(engine.url, after), after)
        if self._expect is Expect.CHANGE and moved == 0:
            raise WeightUpdateError("the canary did not change: the engine serves its old weights", engine=engine.url)
        if self._expect is Expect.SAME and moved > self._tolerance:
            raise WeightUpdateError(f"the canary moved by {moved:g} nats and should not have", engine=engine.url)
        if self._reference is None:
            self._reference = (engine.url, after)
        apart = self._distance(self._reference[1], after)
        if apart > self._tolerance:
            reason = f"the canary is {apart:g} nats away from {self._reference[0]}'s"
            raise WeightUpdateError(reason, engine=engine.url)

    async def _probe(self, engine: Engine) -> list[tuple[int, float]]:
        out: list[tuple[int, float]] = []
        for prompt in self._prompts:
            result = await engine.generate(prompt, self._params)
            out += [(int(i), float(p)) for i, p in zip(result.output_ids, result.logprobs, strict=True)]
        return out

    def _distance(self, a: Sequence[tuple[int, float]], b: Sequence[tuple[int, float]]) -> float:
        """Largest difference of log-probs, up to the first token that differs.

        After another token the rest is another text. A near tie may fall either way without any change of weights,
        so a different token counts with the difference of the two tokens' log-probs, no more.
        """
        largest = 0.0
        for (left, x), (right, y) in zip(a, b, strict=True):
            largest = max(largest, abs(x - y))
            if left != right:
                break
        return largest
