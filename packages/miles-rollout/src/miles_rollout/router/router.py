"""The router sends each turn to an engine, and sends it to another when that one dies.

An engine that dies, hangs or keeps failing is quarantined: its in-flight turns are issued again elsewhere, and it
serves again only after it is healthy and reports the current weight version. One that answered its health checks
while its turns failed stays out for 1, 2, 4 ... rounds of them. A turn that is issued again keeps its seed, so the
session loses time and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from miles_contracts import (
    DeadlineExceededError,
    Engine,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    InvalidFieldError,
    SamplingParams,
)
from miles_rollout.engine_stream import OnPartial, generate_on
from miles_rollout.router.counts import EngineCounts, RouterCounts
from miles_rollout.router.table import Placement, RouterTable

_log = logging.getLogger(__name__)
_RETRIED_STATUS = (408, 429)
_LONGEST_PROBATION = 256


class RouterConfig(BaseModel):
    """Deadlines and limits of the router."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    placement: Placement = Field(default=Placement.AFFINITY, description="How turns find their engine.")
    max_sessions: int = Field(default=100_000, ge=1, description="Sessions remembered for affinity.")
    max_reissues: int = Field(default=3, ge=0, description="Times one turn is issued again after an engine failed.")
    strikes: int = Field(default=3, ge=1, description="Failed or overdue turns in a row that quarantine an engine.")
    health_interval_s: float = Field(default=2.0, gt=0, description="Seconds between rounds of health checks.")
    health_deadline_s: float = Field(default=5.0, gt=0, description="Seconds an engine has to answer a health check.")
    health_misses: int = Field(default=2, ge=1, description="Missed health checks in a row that quarantine an engine.")
    turn_deadline_s: float | None = Field(default=None, gt=0, description="Seconds one turn may take; none for ever.")
    no_engine_s: float = Field(default=300.0, gt=0, description="Seconds a turn waits while no engine serves.")


class Router:
    """Places turns on engines and watches the engines' health.

    Args:
        engines: what to route to; their URLs are their names.
        config: deadlines and limits.
        version: weight version that engines must serve, None while that is not known.
        seed: of random placement.

    Attributes:
        on_admit: asked of each engine before it serves again; an error keeps it out for another round of checks.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        config: RouterConfig | None = None,
        version: int | None = None,
        seed: int = 0,
    ) -> None:
        self._config = config or RouterConfig()
        self._engines = {engine.url: engine for engine in engines}
        self._table = RouterTable(
            [e.url for e in engines],
            placement=self._config.placement,
            max_sessions=self._config.max_sessions,
            seed=seed,
        )
        self._version = version
        self._updates_begun = 0
        self._updates_ended = 0
        self._lost = {name: asyncio.Event() for name in self._engines}
        self._serving = asyncio.Event()
        self._serving.set()
        self._strikes = dict.fromkeys(self._engines, 0)
        self._misses = dict.fromkeys(self._engines, 0)
        self._sentence = dict.fromkeys(self._engines, 0)
        self._probation = dict.fromkeys(self._engines, 0)
        self._reissued = 0
        self._quarantined = 0
        self._taken = RouterCounts()
        self.on_admit: Callable[[Engine], Awaitable[None]] | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> list[Engine]:
        """Engines that take turns now."""
        return [self._engines[name] for name in self._table.serving]

    @property
    def quarantined(self) -> dict[str, str]:
        """URL and reason of every engine that is out of service."""
        return {n: s.quarantine for n, s in self._table.slots.items() if s.quarantine is not None}

    @property
    def reissued_turns(self) -> int:
        """Turns issued again since the start."""
        return self._reissued

    async def start(self) -> None:
        """Begin the health checks."""
        if self._monitor is not None:
            raise InvalidFieldError("router", "running", "start it once")
        self._monitor = asyncio.create_task(self._watch(), name="router-health")

    async def close(self) -> None:
        """End the health checks. Engines are not touched."""
        if self._monitor is not None:
            self._monitor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitor
            self._monitor = None
        await asyncio.gather(*self._aborts, return_exceptions=True)

    def set_version(self, version: int) -> None:
        """Engines must serve `version` from now on; those that are quarantined return once they do."""
        if self._version is not None and version < self._version:
            raise InvalidFieldError("version", version, f"versions never go back from {self._version}")
        self._version = version

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While weights change an engine may be between versions: no check holds that against it."""
        self._updates_begun += 1
        try:
            yield
        finally:
            self._updates_ended += 1

    def add_engine(self, engine: Engine) -> None:
        """A new or restarted engine. It serves once it is healthy and has the current weights."""
        if engine.url in self._engines:
            self.quarantine(engine.url, "restarted")
        else:
            self._table.add(engine.url, quarantine="new")
            self._lost[engine.url] = asyncio.Event()
            self._lost[engine.url].set()
        self._engines[engine.url] = engine
        self._strikes[engine.url] = self._misses[engine.url] = 0
        self._sentence[engine.url] = self._probation[engine.url] = 0

    def quarantine(self, url: str, reason: str) -> None:
        """Take an engine out of service; its in-flight turns are issued again elsewhere."""
        if self._table.quarantine(url, reason):
            _log.warning("engine %s is out of service: %s", url, reason)
            self._quarantined += 1
            self._lost[url].set()
            if not self._table.serving:
                self._serving.clear()

    def forget(self, key: str) -> None:
        """The session is over; its place is free."""
        self._table.forget(key)

    async def generate(
        self,
        key: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        routing: bool = False,
        routing_start: int = 0,
        on_partial: OnPartial | None = None,
    ) -> GenerateResult:
        """Sample after `input_ids` on the engine of session `key`.

        With `on_partial` the answer is shown while it grows, where the engine can. Once that says that something
        was passed on, a failure is final: another issue could say something else than what is already out.

        Raises:
            EngineError: the engine refused the request (4xx), or every issue of it failed.
            DeadlineExceededError: the turn took too long, or no engine served for `no_engine_s`.
        """
        tokens = len(input_ids) + params.max_new_tokens
        avoid: str | None = None
        watch = None if on_partial is None else _Watch(on_partial)
        for issue in range(1 + self._config.max_reissues):
            name = await self._place(key, tokens, avoid)
            try:
                result = await self._turn(name, input_ids, params, routing, routing_start, watch)
            except DeadlineExceededError as error:
                # Not issued again: the turn may just be long. An engine that only ever hangs is struck out.
                self._strike(name, str(error))
                raise
            except EngineError as error:
                self._failed(name, error)
                if issue == self._config.max_reissues or (watch is not None and watch.passed_on):
                    raise
                self._reissued += 1
                avoid = name
                continue
            finally:
                self._table.done(name, tokens)
            self._strikes[name] = self._sentence[name] = 0
            self._table.answered(name, prompt_tokens=len(input_ids), cached_tokens=result.cached_tokens)
            return result
        raise AssertionError("unreachable: the last issue returns or raises")

    async def check_health(self) -> None:
        """Probe all engines at once and act on what they say."""
        await asyncio.gather(*(self._probe(name) for name in list(self._engines)))

    def metrics(self) -> dict[str, float]:
        """What is so now, and what was done since the start; hit rates are cached prompt tokens over prompt tokens."""
        return self._now() | self._counts().metrics()

    def take_metrics(self) -> dict[str, float]:
        """As `metrics`, but what was done counts from the last call on."""
        return self._now() | self.take_counts().metrics()

    def take_counts(self) -> RouterCounts:
        """What was done since the last call of this or of `take_metrics`."""
        counts = self._counts()
        done, self._taken = counts.since(self._taken), counts
        return done

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of all turns on their way, prompts and longest answers."""
        return sum(slot.outstanding for slot in self._table.slots.values())

    def _now(self) -> dict[str, float]:
        return {
            "router/engines_serving": float(len(self._table.serving)),
            "router/outstanding_tokens": float(self.outstanding_tokens),
        }

    def _counts(self) -> RouterCounts:
        slots = self._table.slots.values()
        return RouterCounts(
            reissued=self._reissued,
            quarantines=self._quarantined,
            engines=tuple(EngineCounts(s.turns, s.prompt_tokens, s.cached_tokens) for s in slots),
        )

    async def _place(self, key: str, tokens: int, avoid: str | None) -> str:
        try:
            async with asyncio.timeout(self._config.no_engine_s):
                while (name := self._table.place(key, tokens, avoid=avoid)) is None:
                    await self._serving.wait()
                return name
        except TimeoutError as error:
            reasons = "; ".join(f"{url}: {why}" for url, why in self.quarantined.items())
            raise DeadlineExceededError(
                f"an engine that serves ({reasons})", self._config.no_engine_s, "restart the engines"
            ) from error

    async def _turn(
        self,
        name: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        routing: bool,
        routing_start: int,
        watch: _Watch | None,
    ) -> GenerateResult:
        """One issue of a turn, given up as soon as its engine is lost or the caller no longer wants it."""
        engine, request_id = self._engines[name], uuid.uuid4().hex
        turn = asyncio.ensure_future(
            generate_on(
                engine,
                input_ids,
                params,
                request_id=request_id,
                routing=routing,
                routing_start=routing_start,
                on_partial=watch,
            )
        )
        lost = asyncio.ensure_future(self._lost[name].wait())
        try:
            await asyncio.wait((turn, lost), timeout=self._config.turn_deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if turn.done():
                return turn.result()
            if lost.done():
                reason = self._table.slots[name].quarantine or "it was replaced"
                raise EngineUnavailableError(name, f"lost during a turn: {reason}")
            raise DeadlineExceededError(
                f"a turn on {name}", self._config.turn_deadline_s or 0.0, "raise turn_deadline_s, or shorten answers"
            )
        finally:
            lost.cancel()
            if not turn.done():
                turn.cancel()
                self._abort(engine, request_id)

    def _failed(self, name: str, error: EngineError) -> None:
        """Raise `error` again when the request is to blame, else count it against the engine."""
        if isinstance(error, EngineUnavailableError):
            self.quarantine(name, error.reason)
            return
        if error.status is not None and 400 <= error.status < 500 and error.status not in _RETRIED_STATUS:
            raise error
        self._strike(name, error.reason)

    def _strike(self, name: str, reason: str) -> None:
        self._strikes[name] += 1
        if self._strikes[name] >= self._config.strikes:
            # Its health checks say nothing about sampling, so they alone must not bring it back at once.
            self._sentence[name] = min(2 * self._sentence[name], _LONGEST_PROBATION) or 1
            self._probation[name] = self._sentence[name]
            self.quarantine(name, f"{self._strikes[name]} failures in a row, the last: {reason}")

    def _abort(self, engine: Engine, request_id: str) -> None:
        """Tell an engine, in the background, that nobody waits for a request any more."""

        async def abort() -> None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self._config.health_deadline_s):
                    await engine.abort(request_id)

        task = asyncio.create_task(abort(), name=f"abort-{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await self.check_health()

    async def _probe(self, name: str) -> None:
        engine, wanted, ended = self._engines[name], self._version, self._updates_ended
        try:
            async with asyncio.timeout(self._config.health_deadline_s):
                problem = await self._problem(engine, wanted)
                if problem is None and self.on_admit is not None and self._table.slots[name].quarantine is not None:
                    await self.on_admit(engine)
        except TimeoutError:
            problem = _Problem(f"no answer to a health check within {self._config.health_deadline_s:g} s")
        except EngineError as error:
            problem = _Problem(error.reason)
        if self._engines[name] is not engine:
            return  # replaced while the probe was under way
        if problem is not None and problem.about_version and self._updates_begun > ended:
            return
        if problem is not None:
            self._misses[name] += 1
            misses = self._misses[name] >= self._config.health_misses
            if problem.about_version or misses or self._table.slots[name].quarantine is not None:
                self.quarantine(name, problem.reason)
            return
        self._misses[name] = 0
        if self._probation[name]:
            self._probation[name] -= 1
            return
        if self._table.admit(name):
            _log.warning("engine %s serves again", name)
            self._strikes[name] = 0
            self._lost[name].clear()
            self._serving.set()

    @staticmethod
    async def _problem(engine: Engine, wanted: int | None) -> _Problem | None:
        """Why an engine may not serve, None when it may."""
        if not await engine.healthy():
            return _Problem("it says that it is not healthy")
        version = await engine.weight_version()
        # A version above `wanted` is the next update, already committed on this engine.
        if wanted is not None and (version is None or version < wanted):
            return _Problem(f"it serves version {version}, the current one is {wanted}", about_version=True)
        return None


@dataclass(frozen=True)
class _Problem:
    """What a health check found; a wrong version needs no second miss."""

    reason: str
    about_version: bool = False


class _Watch:
    """Passes partial results on, and remembers whether any of them cannot be taken back."""

    def __init__(self, on_partial: OnPartial) -> None:
        self._on_partial = on_partial
        self.passed_on = False

    def __call__(self, ids: NDArray[np.int32]) -> bool:
        self.passed_on = self._on_partial(ids) or self.passed_on
        return self.passed_on
