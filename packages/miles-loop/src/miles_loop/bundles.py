"""Requests that are made in one moment go to an engine in one call; each still has its answer when it is there.

A group's answers, or a whole batch's, are asked for at once. An HTTP call for each costs driver and engine as much as
it takes to sample a short answer; one call that streams finished answers costs a fraction. Only the embedded engine
gives them so (SGLang streams every token of such a call), and expert choices are asked for one by one.

    calls of one turn of the event loop  ->  one stream  ->  answer, answer, ... as they finish
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_contracts import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    SamplingParams,
)
from miles_contracts.engine_proxy import EngineProxy
from miles_rollout.engine_client import EngineClient
from miles_rollout.engine_stream import PartialResult


@dataclass(slots=True, eq=False)
class _Call:
    prompt: Sequence[int]
    params: SamplingParams
    request_id: str
    answer: asyncio.Future[GenerateResult]


class BundlingEngine(EngineProxy):
    """An engine whose requests of one moment are sent together."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self._client = engine
        self._waiting: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        """Sample. A caller that is cancelled has its request aborted on the engine.

        Raises: as `EngineClient.generate`.
        """
        if routing or not await self._client.streams_batches():
            return await super().generate(
                input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
            )
        loop = asyncio.get_running_loop()
        call = _Call(input_ids, params, request_id or uuid.uuid4().hex, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._send_waiting)
        self._waiting.append(call)
        return await call.answer

    def generate_stream(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> AsyncGenerator[PartialResult | GenerateResult, None]:
        """As `EngineClient.generate_stream`."""
        return self._client.generate_stream(
            input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
        )

    def _send_waiting(self) -> None:
        calls, self._waiting = [call for call in self._waiting if not call.answer.done()], []
        if len(calls) > 1:
            self._send(calls, self._together(calls))
        elif calls:
            self._send(calls, self._alone(calls[0]))

    def _send(self, calls: list[_Call], exchange: Coroutine[Any, Any, None]) -> None:
        """Do an exchange, until nobody waits for any of its calls."""
        sending = self._in_background(exchange)
        open_calls = set(calls)

        def settled(call: _Call, answer: asyncio.Future[GenerateResult]) -> None:
            open_calls.discard(call)
            if not answer.cancelled():
                return
            if open_calls:
                self._in_background(self._abort_quietly(call.request_id))
            else:
                sending.cancel()  # hanging up aborts all that is left of them

        for call in calls:
            call.answer.add_done_callback(partial(settled, call))

    async def _together(self, calls: list[_Call]) -> None:
        """Each call gets its answer or the error.

        One refused prompt must not fail the others, and what is between here and the engine may know no streams: a
        bundle that is refused as a whole is sent again, call by call, in the ordinary way.
        """
        try:
            answers = self._client.generate_each(
                [c.prompt for c in calls], [c.params for c in calls], request_ids=[c.request_id for c in calls]
            )
            async with aclosing(answers):
                async for index, result in answers:
                    if not calls[index].answer.done():
                        calls[index].answer.set_result(result)
        except Exception as error:  # noqa: BLE001 - request boundary: whoever asked gets the error
            left = [call for call in calls if not call.answer.done()]
            refused = isinstance(error, EngineError) and not isinstance(error, EngineUnavailableError)
            if refused and len(left) == len(calls):
                for call in left:
                    self._send([call], self._alone(call))
                return
            for call in left:
                call.answer.set_exception(error)

    async def _alone(self, call: _Call) -> None:
        try:
            result = await self._client.generate(call.prompt, call.params, request_id=call.request_id)
        except Exception as error:  # noqa: BLE001 - request boundary: whoever asked gets the error
            if not call.answer.done():
                call.answer.set_exception(error)
        else:
            if not call.answer.done():
                call.answer.set_result(result)

    async def _abort_quietly(self, request_id: str) -> None:
        with suppress(EngineError, DeadlineExceededError):
            await self._client.abort(request_id)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
