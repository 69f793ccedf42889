"""What one trajectory asks for: tokens of an engine, and seconds of an environment between its turns."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from miles_contracts import InvalidFieldError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to an engine and what the environment does with its answer.

    Attributes:
        new_prompt: tokens that the context has gained since the turn before (all of the prompt for the first).
        sampled: tokens that the engine samples.
        delay_s: seconds until the next turn starts, or the trajectory ends.
    """

    new_prompt: int
    sampled: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """A trajectory's work. `fails` ends it as failed when its last turn is over."""

    turns: tuple[Turn, ...]
    fails: bool = False


class Workload(Protocol):
    """Where episodes come from. The same (prompt, member, attempt) always gives the same episode."""

    def episode(self, prompt_index: int, member: int, attempt: int) -> Episode:
        """The work of one member of a group."""
        ...

    def filtered(self, prompt_index: int, attempt: int) -> bool:
        """True when the group, once finished, is refused by the filter (no signal)."""
        ...


@dataclass(frozen=True, slots=True)
class Pareto:
    """Pareto-distributed seconds, cut: `scale` is the least, `tail` x `scale` the most.

    Attributes:
        scale: smallest value.
        alpha: exponent; the smaller, the heavier the tail.
        tail: largest value over the smallest; 1 makes it a constant.
    """

    scale: float
    alpha: float = 1.5
    tail: float = 20.0

    def __post_init__(self) -> None:
        for name, value, least in (("scale", self.scale, 0.0), ("tail", self.tail, 1.0)):
            if not value >= least or math.isinf(value):
                raise InvalidFieldError(name, value, f"use a finite value >= {least:g}")
        if not self.alpha > 0:
            raise InvalidFieldError("alpha", self.alpha, "use a value > 0")

    @classmethod
    def of_mean(cls, mean: float, *, alpha: float = 1.5, tail: float = 20.0) -> Pareto:
        """The one whose mean is `mean`."""
        unit = cls(1.0, alpha, tail).mean
        return cls(mean / unit, alpha, tail)

    @property
    def mean(self) -> float:
        """Expected value, the cut included."""
        if self.alpha == 1.0:
            return self.scale * (1.0 + math.log(self.tail))
        above: float = (1.0 - self.tail ** (1.0 - self.alpha)) / (self.alpha - 1.0)
        return self.scale * (1.0 + above)

    def at(self, uniform: float) -> float:
        """The value at probability `uniform` in [0, 1)."""
        times: float = (1.0 - uniform) ** (-1.0 / self.alpha)
        return self.scale * min(times, self.tail)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens with a mean and a coefficient of variation, between 1 and `most`."""

    mean: float
    spread: float = 0.0
    most: int | None = None

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.spread == 0.0 or self.mean == 0.0:
            value = self.mean
        else:
            variance = math.log1p(self.spread**2)
            value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        rounded = round(value) if self.mean == 0.0 else max(1, round(value))
        return rounded if self.most is None else min(rounded, self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """Episodes drawn from distributions; every draw depends only on the seed and on who it is for.

    Attributes:
        turns: requests of one trajectory; `turns_spread` is its coefficient of variation.
        prompt: tokens of the first prompt, without what the group's other members share with it.
        observation: tokens that the environment adds between turns.
        sampled: tokens of one answer.
        delay: seconds of the environment after each answer.
        failure_rate: share of trajectories that fail.
        filter_rate: share of groups that the filter refuses.
        seed: of everything.
    """

    turns: Lengths
    prompt: Lengths
    observation: Lengths
    sampled: Lengths
    delay: Pareto
    failure_rate: float = 0.0
    filter_rate: float = 0.0
    seed: int = 0

    def episode(self, prompt_index: int, member: int, attempt: int) -> Episode:
        """The work of one member of a group."""
        rng = random.Random(_mix(self.seed, prompt_index, member + 1, attempt))
        turns = self.turns.draw(rng)
        made = tuple(
            Turn(
                self.prompt.draw(rng) if turn == 0 else self.observation.draw(rng),
                self.sampled.draw(rng),
                self.delay.at(rng.random()),
            )
            for turn in range(turns)
        )
        return Episode(made, fails=self.failure_rate > 0.0 and rng.random() < self.failure_rate)

    def filtered(self, prompt_index: int, attempt: int) -> bool:
        """True when the filter refuses the group."""
        if self.filter_rate == 0.0:
            return False
        return random.Random(_mix(self.seed, prompt_index, 0, attempt)).random() < self.filter_rate


def _mix(*parts: int) -> int:
    """One whole number for all of them; neighbours give unrelated streams once `Random` has hashed it."""
    mixed = 0
    for part in parts:
        mixed = mixed * 1_000_003 + part
    return mixed
