"""An engine with continuous batching, in simulated time.

All running sequences gain tokens at the same rate, which depends on how many there are and on their contexts. So one
number, the tokens that a sequence running since the start would have gained, says how far everybody is: a sequence
that enters at v and wants n tokens leaves when that number is v + n, whoever comes and goes meanwhile. Prompts are
computed before anything else, as engines do: while one is, no sequence gains a token.

Engines work in rounds, one decoding step after the other: whoever arrives in the middle of a round starts with the
next one. Rounds need no events of their own, they end where that number is a multiple of what a round gains.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from miles_contracts import InvalidFieldError

_TIMES = (
    "base_s",
    "per_sequence_s",
    "read_per_sequence_s",
    "per_context_token_s",
    "overhead_s",
    "expert_s",
    "prefill_s_per_token",
    "latency_s",
)
_TOLERANCE = 1e-6
"""Tokens that count as none: late in a long run the clock itself is no finer."""
_REFRESH_TOKENS = 256.0
"""Tokens after which the rate is taken anew while contexts grow and nobody comes or goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """How fast one engine is.

    A decoding step of n sequences with c tokens of context between them takes

        reading    = base_s + expert_s * (1 - (1 - expert_share)^n) + read_per_sequence_s * n + per_context_token_s * c
        arithmetic = per_sequence_s * n
        step       = (reading + arithmetic, or with `roofline` the larger of the two) + curve(n) + overhead_s

    Attributes:
        base_s: seconds of a step that do not depend on the load (reading the weights every token needs).
        per_sequence_s: seconds that one more sequence costs (arithmetic).
        read_per_sequence_s: seconds for reading what attention looks at whatever the context's length.
        per_context_token_s: seconds that one more token of context costs (reading keys and values).
        curve: measured (mean sequences, seconds) in increasing order; straight between them, and on beyond them.
        overhead_s: seconds of launching and communication.
        expert_s: seconds for reading all routed experts.
        expert_share: experts per token over experts.
        roofline: reading and arithmetic overlap.
        tokens_per_step: tokens that a sequence gains in a step; above 1 with speculative decoding.
        prefill_s_per_token: seconds for one token of prompt.
        max_running: sequences that run at the same time; more wait in the engine.
        kv_tokens: tokens of context that fit, None for no bound. A sequence larger than it runs alone.
        latency_s: seconds that a turn takes besides the engine's own time, half of them before it (network, server).
        rounds: who arrives in the middle of a round starts with the next one; without, at once.
    """

    base_s: float = 0.0
    per_sequence_s: float = 0.0
    read_per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    overhead_s: float = 0.0
    expert_s: float = 0.0
    expert_share: float = 1.0
    roofline: bool = False
    curve: tuple[tuple[float, float], ...] = ()
    tokens_per_step: float = 1.0
    prefill_s_per_token: float = 0.0
    max_running: int = 256
    kv_tokens: int | None = None
    latency_s: float = 0.0
    rounds: bool = True

    def __post_init__(self) -> None:
        for name in _TIMES:
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise InvalidFieldError(name, value, "use a finite value >= 0")
        sizes = [n for n, _ in self.curve]
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1 or not all(0 < t < math.inf for _, t in self.curve):
            raise InvalidFieldError("curve", self.curve, "give (sequences >= 1, seconds > 0) in increasing order")
        if not 0.0 < self.expert_share <= 1.0:
            raise InvalidFieldError("expert_share", self.expert_share, "use a share above 0 and at most 1")
        if self.step_s(1, 1.0) <= 0.0:
            raise InvalidFieldError("base_s", self.base_s, "a step takes some time; set base_s or per_sequence_s")
        if not self.tokens_per_step > 0.0:
            raise InvalidFieldError("tokens_per_step", self.tokens_per_step, "use a value > 0")
        if self.max_running < 1:
            raise InvalidFieldError("max_running", self.max_running, "use a value >= 1")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise InvalidFieldError("kv_tokens", self.kv_tokens, "use a value >= 1, or leave it out")

    def step_s(self, sequences: int, context_tokens: float) -> float:
        """Seconds of one decoding step."""
        reading = self.base_s + self.read_per_sequence_s * sequences + self.per_context_token_s * context_tokens
        if self.expert_s:
            reading += self.expert_s * (1.0 - (1.0 - self.expert_share) ** sequences)
        arithmetic = self.per_sequence_s * sequences
        fixed = self.overhead_s + (self._on_curve(sequences) if self.curve else 0.0)
        return (max(reading, arithmetic) if self.roofline else reading + arithmetic) + fixed

    def _on_curve(self, sequences: int) -> float:
        if len(self.curve) == 1 or sequences <= self.curve[0][0]:
            return self.curve[0][1]
        right = next((i for i, (n, _) in enumerate(self.curve) if n >= sequences), len(self.curve) - 1)
        (a, low), (b, high) = self.curve[right - 1], self.curve[right]
        # A last piece that falls (measurements are noisy) must not be followed down to nothing.
        return max(low + (high - low) * (sequences - a) / (b - a), min(low, high))

    def tokens_per_s(self, sequences: int, context_tokens: float = 0.0) -> float:
        """Tokens that all sequences together gain in a second."""
        return sequences * self.tokens_per_step / self.step_s(sequences, context_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """One turn on an engine.

    Attributes:
        owner: whoever wants to be told.
        prefill: tokens to compute before the first is sampled.
        context: tokens of context when sampling starts.
        sampled: tokens to sample.
        first_version, last_version: weight versions of its first and its latest token.
    """

    owner: object
    prefill: int
    context: int
    sampled: int
    first_version: int = 0
    last_version: int = 0


class SimEngine:
    """One engine. Whoever owns it calls `advance` before anything else at a given time, and asks `next_event`.

    Args:
        rates: how fast it is.
    """

    def __init__(self, rates: EngineRates) -> None:
        self._rates = rates
        self._gained = 0.0
        self._now = 0.0
        self._prefill_s = 0.0
        self._running: list[tuple[float, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._context = 0.0
        self._reserved = 0
        self._order = 0
        self._per_s = 0.0
        self._refresh_at = math.inf
        self.version = 0
        self.paused = False
        self.busy_s = 0.0
        """Seconds in which it computes: it has a request, and no weights change."""
        self.tokens = 0
        """Tokens sampled for finished requests."""

    @property
    def outstanding(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def context_tokens(self) -> float:
        """Tokens of context of what runs."""
        return self._context + self._gained * len(self._running)

    def advance(self, now: float) -> None:
        """Let time pass until `now`, which is no later than `next_event`."""
        passed = now - self._now
        self._now = now
        if self.paused or passed <= 0.0:
            return
        if self._running:
            self.busy_s += passed
        computing = min(passed, self._prefill_s)
        self._prefill_s -= computing
        if self._running:
            self._gained += (passed - computing) * self._per_s

    def add(self, request: Request) -> None:
        """A request arrives."""
        self._waiting.append(request)
        self._admit()

    def finished(self) -> list[Request]:
        """What has all its tokens by now, in order; it leaves the engine."""
        done: list[Request] = []
        if self.paused:
            return done
        reached = self._gained + self._slack
        while self._running and self._running[0][0] <= reached:
            target, _, request = heapq.heappop(self._running)
            self._context -= request.context - (target - self._whole_rounds(request.sampled))
            self._reserved -= request.context + request.sampled
            self.tokens += request.sampled
            request.last_version = self.version
            done.append(request)
        if done or self._fits_next():
            self._admit()
        elif self._refresh_at <= reached:
            self._rate()
        return done

    def pause(self) -> None:
        """Stop sampling, for new weights."""
        self.paused = True

    def resume(self, version: int, *, recompute: bool) -> None:
        """Go on with weights `version`; `recompute` computes all contexts again first (retract)."""
        self.paused = False
        self.version = version
        if recompute:
            self._prefill_s += self.context_tokens * self._rates.prefill_s_per_token
        self._admit()

    def next_event(self) -> float:
        """When something happens unless something else does before; infinity for never."""
        if self.paused or not self._running:
            return math.inf
        target = min(self._running[0][0], self._refresh_at)
        if self._fits_next():
            size = self._rates.tokens_per_step
            target = min(target, math.ceil((self._gained - self._slack) / size) * size)
        return self._now + self._prefill_s + max(0.0, target - self._gained) / self._per_s

    @property
    def _slack(self) -> float:
        return _TOLERANCE * max(1.0, self._gained)

    def _between_rounds(self) -> bool:
        size = self._rates.tokens_per_step
        past = self._gained % size
        return not self._running or not self._rates.rounds or min(past, size - past) <= self._slack

    def _fits_next(self) -> bool:
        """Whether somebody waits for whom there is room."""
        rates = self._rates
        if not self._waiting or len(self._running) >= rates.max_running:
            return False
        size = self._waiting[0].context + self._waiting[0].sampled
        return rates.kv_tokens is None or not self._running or self._reserved + size <= rates.kv_tokens

    def _admit(self) -> None:
        rates = self._rates
        between = self._between_rounds()
        while not self.paused and between and self._fits_next():
            request = self._waiting.popleft()
            self._prefill_s += request.prefill * rates.prefill_s_per_token
            request.first_version = self.version
            self._order += 1
            heapq.heappush(self._running, (self._gained + self._whole_rounds(request.sampled), self._order, request))
            self._context += request.context - self._gained
            self._reserved += request.context + request.sampled
        self._rate()

    def _whole_rounds(self, tokens: int) -> float:
        """What everybody gains until one has so many tokens: whole rounds, where there are rounds."""
        size = self._rates.tokens_per_step
        return math.ceil(tokens / size - _TOLERANCE) * size if self._rates.rounds else tokens

    def _rate(self) -> None:
        rates = self._rates
        if not self._running:
            self._gained = self._context = 0.0
            self._refresh_at = math.inf
            return
        held, self._refresh_at = self.context_tokens, math.inf
        if rates.per_context_token_s > 0.0:
            stretch = min(_REFRESH_TOKENS, self._running[0][0] - self._gained)
            self._refresh_at = self._gained + stretch
            held += len(self._running) * stretch / 2  # the context in the middle of the time this rate holds
        self._per_s = rates.tokens_per_step / rates.step_s(len(self._running), held)
