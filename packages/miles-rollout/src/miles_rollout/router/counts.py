"""What a router has done, as plain numbers: of all time, or of the time between two looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Answered turns of one engine, and their prompt tokens, those found in its cache apart."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """Engines in the order in which the router knows them."""

    reissued: int = 0
    quarantines: int = 0
    engines: tuple[EngineCounts, ...] = field(default=())

    def plus(self, other: RouterCounts) -> RouterCounts:
        """Of both together, which know the same engines in the same order (or one of them none yet)."""
        pairs = zip_longest(self.engines, other.engines, fillvalue=EngineCounts())
        return RouterCounts(
            reissued=self.reissued + other.reissued,
            quarantines=self.quarantines + other.quarantines,
            engines=tuple(
                EngineCounts(
                    turns=one.turns + two.turns,
                    prompt_tokens=one.prompt_tokens + two.prompt_tokens,
                    cached_tokens=one.cached_tokens + two.cached_tokens,
                )
                for one, two in pairs
            ),
        )

    def since(self, earlier: RouterCounts) -> RouterCounts:
        """What was added after `earlier`; engines that came later start from nothing."""
        missing = len(self.engines) - len(earlier.engines)
        before = (*earlier.engines, *(EngineCounts(),) * missing)
        return RouterCounts(
            reissued=self.reissued - earlier.reissued,
            quarantines=self.quarantines - earlier.quarantines,
            engines=tuple(
                EngineCounts(
                    turns=now.turns - then.turns,
                    prompt_tokens=now.prompt_tokens - then.prompt_tokens,
                    cached_tokens=now.cached_tokens - then.cached_tokens,
                )
                for now, then in zip(self.engines, before, strict=True)
            ),
        )

    def metrics(self) -> dict[str, float]:
        """Under their names in the records. Hit rates are cached prompt tokens over prompt tokens, and left out
        where no engine said what it found."""
        out = {"router/reissued_turns": float(self.reissued), "router/quarantines": float(self.quarantines)}
        for index, engine in enumerate(self.engines):
            out[f"router/engine_{index}/turns"] = float(engine.turns)
            if engine.prompt_tokens:
                out[f"router/engine_{index}/prefix_cache_hit_rate"] = engine.cached_tokens / engine.prompt_tokens
        if prompt := sum(e.prompt_tokens for e in self.engines):
            out["rollout/prefix_cache_hit_rate"] = sum(e.cached_tokens for e in self.engines) / prompt
        return out
