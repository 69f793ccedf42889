"""A sequence is one request inside the engine: its tokens, what was sampled, and where its KV cache stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_rollout.engine.prefix_tree import Node, TokenArray


class State(Enum):
    """Where a sequence is."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn and when to stop; validated by `requests`.

    Attributes:
        max_new_tokens: already clamped to the context and the KV capacity; 0 only computes the prompt.
        top_k: 0 is off.
        seed: with the index of the new token it decides the token's random number.
        stop: strings that end the text.
        stop_ids: token ids that end it (the model's own end tokens included unless ignored).
        no_stop_trim: leave the stop string or token in the returned text.
    """

    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True

    @property
    def truncates(self) -> bool:
        """Whether part of the support is cut off before drawing."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended: `kind` is stop, length or abort; `detail` the matched id or string, length or message."""

    kind: str
    detail: int | str

    def as_json(self) -> dict[str, int | str]:
        """SGLang's form."""
        key = {"stop": "matched", "length": "length", "abort": "message"}[self.kind]
        return {"type": self.kind, key: self.detail}


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One request.

    Attributes:
        tokens: int32 buffer for prompt and new tokens; the first `length` are known.
        computed: leading tokens whose keys and values are in the cache.
        first_logprob: prompt position from which log-probs of the prompt are wanted, -1 for none.
        cached: prompt tokens found in the prefix cache when it first ran, None before that.
        versions: [version, start, end] of the new tokens, in order.
        clean: everything computed so far was computed under the present weights.
        node: the locked end of the part that the prefix tree owns; `owned` tokens lead to it.
        held: leading tokens that have a slot.
        routes: expert ids [fed, layers, top_k]; the first time a token is fed decides its row. `routed` are known.
        capture_s: seconds that recording its routes took.
        cache_routes: the rows of the pass that computed the present keys and values, which the prefix cache hands
            on with them; None while they are those of `routes`, that is until the sequence is fed a second time.
        native_cache: the model's own cache object, when the model does not run on slots.
    """

    id: str
    tokens: TokenArray
    prompt_length: int
    sampling: Sampling
    stream: bool = False
    first_logprob: int = -1
    length: int = 0
    arrival: int = 0
    state: State = State.WAITING
    computed: int = 0
    cached: int | None = None
    row: int = -1
    node: Node | None = None
    owned: int = 0
    held: int = 0
    clean: bool = True
    retractions: int = 0
    native_cache: Any = None
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    versions: list[list[Any]] = field(default_factory=list)
    routes: NDArray[Any] | None = None
    cache_routes: NDArray[Any] | None = None
    routed: int = 0
    capture_s: float = 0.0
    finish: Finish | None = None
    waits_for: tuple[Sequence, int] | None = None

    def __post_init__(self) -> None:
        self.length = self.prompt_length

    @property
    def known(self) -> TokenArray:
        """All tokens so far."""
        return self.tokens[: self.length]

    @property
    def output_ids(self) -> list[int]:
        """New tokens so far."""
        ids: list[int] = self.tokens[self.prompt_length : self.length].tolist()
        return ids

    @property
    def num_new(self) -> int:
        """How many tokens were sampled."""
        return self.length - self.prompt_length

    @property
    def match_limit(self) -> int:
        """Most tokens that may come from the cache: the last must be fed, and so must all whose logits are wanted."""
        first = max(self.first_logprob, 1)
        if self.first_logprob >= 0 and len(self.prompt_logprobs) < self.prompt_length - first:
            return min(self.length - 1, first - 1)
        return self.length - 1

    def append(self, token: int, logprob: float, version: str) -> None:
        """Record one sampled token and apply the stop rules that need no text."""
        self.tokens[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        new = self.length - self.prompt_length
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][2] = new
        else:
            self.versions.append([version, new - 1, new])
        if token in self.sampling.stop_ids:
            self.finish = Finish("stop", token)
        elif new >= self.sampling.max_new_tokens:
            self.finish = Finish("length", new)

    def feed_again(self) -> None:
        """After a retraction all tokens are fed anew, perhaps under other weights."""
        if self.routes is not None:
            self.cache_routes = np.empty_like(self.routes)

    def record_routes(self, start: int, rows: NDArray[Any]) -> None:
        """Keep the expert ids of tokens `start` .., of which the first `routed` are known already.

        A token that is fed again (after a retraction) keeps the row of the first time: that is the one whose
        logits sampled its successors. Rows behind a gap are not kept: the answer then has fewer rows than tokens
        were fed, which whoever asked for them refuses.
        """
        end = start + len(rows)
        if start == self.routed and self.routes is not None and self.cache_routes is None:  # nearly always
            self.routes[start:end] = rows
            self.routed = end
            return
        if self.cache_routes is not None:
            self.cache_routes[start:end] = rows
        fresh = rows[self.routed - start :]
        if start > self.routed or len(fresh) == 0:
            return
        if self.routes is None:
            self.routes = np.empty((len(self.tokens), *rows.shape[1:]), dtype=rows.dtype)
        self.routes[self.routed : self.routed + len(fresh)] = fresh
        self.routed += len(fresh)

    def rows_to_share(self, count: int) -> NDArray[Any] | None:
        """Rows of the first `count` tokens as the keys and values in the cache were computed; None when not known."""
        if self.routes is None or self.routed < count:
            return None
        return (self.routes if self.cache_routes is None else self.cache_routes)[:count]
