"""Makes every batch of a synchronous run the same batch for the engine, whatever the clock does.

A sampled token depends on its own seed alone, but the last bits of its log-prob depend on what else is in the
engine's batch: matrix kernels round differently for other shapes. A run whose requests arrive one by one can hence
never be repeated bit for bit. So at pipeline depth 0 requests meet at a barrier: when every trajectory in flight
waits for its engine, all are sent in one call, in an order that depends on nothing but themselves.

    trajectories in flight:  3   ->  barrier opens when 3 wait  ->  one call each engine  ->  3 answers at once
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from miles_contracts import EngineError, EngineUnavailableError, GenerateResult, SamplingParams
from miles_contracts.engine_proxy import EngineProxy
from miles_rollout.engine_client import EngineClient

_POLL_S = 0.0005
_QUIET_TURNS = 20
"""Turns of the event loop without a new request after which a round is complete, where nobody counts for us."""


@dataclass(slots=True, eq=False)
class _Call:
    engine: EngineClient
    prompt: list[int]
    params: SamplingParams
    request_id: str
    routing: bool
    routing_start: int
    answer: asyncio.Future[GenerateResult]
    batch: list[_Call] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None

    @property
    def order(self) -> tuple[int, list[int]]:
        """Seeds are derived from prompt, member and attempt: unique but for accidents."""
        return (self.params.seed or 0, self.prompt)


class Lockstep:
    """Holds requests back until a round is complete.

    Args:
        in_flight: how many trajectories are under way; None takes a round as complete when no more requests come.
    """

    def __init__(self, in_flight: Callable[[], int] | None = None) -> None:
        self.in_flight = in_flight
        self._waiting: list[_Call] = []
        self._rounds: asyncio.Task[None] | None = None

    async def generate(
        self,
        engine: EngineClient,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        routing: bool,
        routing_start: int = 0,
    ) -> GenerateResult:
        """The answer to one request, sent with its round."""
        answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        call = _Call(engine, list(prompt), params, request_id, routing, routing_start, answer)
        self._waiting.append(call)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run(), name="lockstep")
        try:
            return await call.answer
        finally:
            if call in self._waiting:  # cancelled before its round
                self._waiting.remove(call)
            if call.sending is not None and all(c.answer.done() for c in call.batch):
                # Nobody waits for this engine any more (it hangs, say): the next round must not wait for it either.
                call.sending.cancel()

    async def _run(self) -> None:
        while self._waiting:
            await self._complete_round()
            calls, self._waiting = sorted(self._waiting, key=lambda c: c.order), []
            batches: dict[tuple[str, bool], list[_Call]] = {}
            for call in calls:
                batches.setdefault((call.engine.url, call.routing), []).append(call)
            await asyncio.gather(*(self._start(batch) for batch in batches.values()), return_exceptions=True)
            await asyncio.sleep(0)

    def _start(self, batch: list[_Call]) -> asyncio.Task[None]:
        sending = asyncio.create_task(self._send(batch))
        for call in batch:
            call.batch, call.sending = batch, sending
        return sending

    async def _complete_round(self) -> None:
        if self.in_flight is not None:
            while len(self._waiting) < self.in_flight():  # noqa: ASYNC110 - the count is a pure state machine's
                await asyncio.sleep(_POLL_S)
            return
        quiet, seen = 0, len(self._waiting)
        while quiet < _QUIET_TURNS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    async def _send(self, batch: list[_Call]) -> None:
        """One call; each request gets its answer or the error. One refused prompt must not fail the others."""
        first = batch[0]
        try:
            answers = await first.engine.generate_batch(
                [c.prompt for c in batch],
                [c.params for c in batch],
                request_ids=[c.request_id for c in batch],
                routing=first.routing,
                routing_starts=[c.routing_start for c in batch],
            )
        except EngineError as error:
            if len(batch) > 1 and not isinstance(error, EngineUnavailableError):
                for call in batch:
                    await self._send([call])
                return
            self._fail(batch, error)
        except Exception as error:  # noqa: BLE001 - request boundary: whoever asked gets the error
            self._fail(batch, error)
        else:
            for call, answer in zip(batch, answers, strict=True):
                if not call.answer.done():
                    call.answer.set_result(answer)

    def _fail(self, batch: list[_Call], error: Exception) -> None:
        for call in batch:
            if not call.answer.done():
                call.answer.set_exception(error)


class LockstepEngine(EngineProxy):
    """An engine whose requests wait for their round."""

    def __init__(self, engine: EngineClient, lockstep: Lockstep) -> None:
        super().__init__(engine)
        self._client = engine
        self._lockstep = lockstep

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        """Sample, in step with all others."""
        name = request_id or uuid.uuid4().hex
        return await self._lockstep.generate(self._client, input_ids, params, name, routing, routing_start)
