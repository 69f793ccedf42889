"""The HTTP face of the engine: SGLang's native calls on aiohttp. Nothing here touches the model directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from miles_contracts import InvalidFieldError, PauseMode, WeightGroupFactory
from miles_rollout.engine.answers import add_routes, generate_answer
from miles_rollout.engine.config import EngineConfig
from miles_rollout.engine.core import EngineCore
from miles_rollout.engine.http import errors_as_answers, frame_response, json_response, read_body, refusal
from miles_rollout.engine.requests import GenerateCall, parse_generate
from miles_rollout.engine.rng import SeedSource
from miles_rollout.engine.sequence import Sequence, State
from miles_rollout.engine.weight_routes import WeightRoutes

_MAX_BODY = 1 << 30
_STREAM_PARTS = 64
"""A streamed answer is sent again once it has grown by this part."""
_Event = tuple[str, int, bool]
"""A sequence's id, how many tokens it has sampled, and whether it has finished."""


class EngineServer:
    """Routes of one engine. The core's `deliver` must be this object's `deliver`.

    Args:
        groups: ways for weights to come besides `torch.distributed`, by the name of their backend.
    """

    def __init__(
        self, config: EngineConfig, info: dict[str, Any], groups: Mapping[str, WeightGroupFactory] | None = None
    ) -> None:
        self.config = config
        self._group_factories = groups or {}
        self.info = info
        self.core: EngineCore
        self._seeds = SeedSource(config.random_seed)
        self._waiters: dict[str, asyncio.Queue[_Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def deliver(self, sequences: list[Sequence]) -> None:
        """From the model thread: wake those who wait for these sequences."""
        events: list[_Event] = [(s.id, s.num_new, s.state is State.FINISHED) for s in sequences]
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, events)

    def _wake(self, events: list[_Event]) -> None:
        for event in events:
            queue = self._waiters.get(event[0])
            if queue is not None:
                queue.put_nowait(event)

    def application(self, core: EngineCore) -> web.Application:
        """The aiohttp application."""
        self.core = core
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[errors_as_answers])
        app.on_startup.append(self._remember_loop)
        add = app.router.add_route
        for method in ("GET", "POST"):
            add(method, "/health", self.health)
            add(method, "/health_generate", self.health_generate)
            add(method, "/get_model_info", self.model_info)
            add(method, "/model_info", self.model_info)
            add(method, "/get_server_info", self.server_info)
            add(method, "/server_info", self.server_info)
            add(method, "/get_weight_version", self.get_weight_version)
            add(method, "/weight_version", self.get_weight_version)
            add(method, "/flush_cache", self.flush_cache)
        add("POST", "/generate", self.generate)
        add("POST", "/abort_request", self.abort_request)
        add("POST", "/pause_generation", self.pause_generation)
        add("POST", "/continue_generation", self.continue_generation)
        WeightRoutes(core, self._group_factories).add_to(app)
        return app

    async def _remember_loop(self, _: web.Application) -> None:
        self._loop = asyncio.get_running_loop()

    async def on_model(self, action: Callable[[], Any]) -> Any:
        """Run `action` on the model thread and wait for its result."""
        return await asyncio.wrap_future(self.core.post(action))

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise InvalidFieldError("body", raw[:60], f"it is not JSON: {error}") from error
        call = parse_generate(body, self.core.request_limits, self.core.codec, self._seeds.next)
        if call.stream:
            return await (self._stream_batch if call.batched else self._stream)(request, call)
        answers = await self._complete(call)
        if not call.routes:
            return json_response(answers if call.batched else answers[0])
        # Routes are megabytes: they are packed and the answer is encoded beside the event loop.
        return await asyncio.to_thread(self._routed_response, call, answers)

    def _routed_response(self, call: GenerateCall, answers: list[dict[str, Any]]) -> web.Response:
        for answer, sequence in zip(answers, call.sequences, strict=True):
            self._add_routes(call, answer, sequence)
        respond = frame_response if call.routes == "bits" else json_response
        return respond(answers if call.batched else answers[0])

    def _add_routes(self, call: GenerateCall, answer: dict[str, Any], sequence: Sequence) -> None:
        recorder = self.core.loaded.routes
        assert recorder is not None  # a request for the routes of a dense model was refused
        add_routes(answer, sequence, call.routes, call.routes_start, recorder.num_experts)

    async def _complete(self, call: GenerateCall) -> list[dict[str, Any]]:
        queue = self._wait_for(call.sequences)
        try:
            await self.on_model(lambda: self.core.submit(call.sequences))
            for _ in call.sequences:
                await queue.get()
        finally:
            self._forget(call.sequences)
        return [self._answer(call, s) for s in call.sequences]

    def _wait_for(self, sequences: list[Sequence]) -> asyncio.Queue[_Event]:
        """A queue of what happens to these sequences, until `_forget`."""
        for sequence in sequences:
            if sequence.id in self._waiters:
                raise InvalidFieldError("rid", sequence.id, "this request is still running; choose another id")
        queue: asyncio.Queue[_Event] = asyncio.Queue()
        self._waiters.update((sequence.id, queue) for sequence in sequences)
        return queue

    def _forget(self, sequences: list[Sequence]) -> None:
        """Stop waiting; what has not finished (the caller went away) is aborted."""
        for sequence in sequences:
            self._waiters.pop(sequence.id, None)
        left = [s.id for s in sequences if s.state is not State.FINISHED]
        if left:
            self.core.post(lambda: [self.core.abort(rid, "the caller went away") for rid in left])

    def _answer(self, call: GenerateCall, sequence: Sequence) -> dict[str, Any]:
        text = self.core.codec.output_text(sequence)
        return generate_answer(sequence, text, logprobs=call.logprobs, weight_version=self.core.weight_version)

    async def _stream(self, request: web.Request, call: GenerateCall) -> web.StreamResponse:
        """Server-sent events, each with all tokens so far (as SGLang does), closed by `[DONE]`.

        Only the last one has the routing. An event comes with every token at first, later with every 64th part
        more, so that all events together cost time linear in the answer's length.
        """
        sequence = call.sequences[0]
        queue = self._wait_for(call.sequences)
        try:
            await self.on_model(lambda: self.core.submit(call.sequences))
            response = await _open_stream(request)
            done, sent = False, 0
            while not done:
                _, count, done = await queue.get()
                while not queue.empty():  # a slow reader gets the newest state, not a backlog
                    _, count, done = queue.get_nowait()
                if not done and count - sent < max(1, sent // _STREAM_PARTS):
                    continue
                answer = (
                    await self.on_model(lambda: self._answer(call, sequence))
                    if not done
                    else self._answer(call, sequence)
                )
                sent = len(answer["output_ids"])
                # It may have finished since it was told to have grown: the event that says so is the last one.
                done = answer["meta_info"]["finish_reason"] is not None
                if done and call.routes:
                    await asyncio.to_thread(self._add_routes, call, answer, sequence)
                await response.write(_event(answer))
            return await _close_stream(response)
        finally:
            self._forget(call.sequences)

    async def _stream_batch(self, request: web.Request, call: GenerateCall) -> web.StreamResponse:
        """Server-sent events of several prompts: one a prompt, with its `index`, when it has finished."""
        places = {sequence.id: place for place, sequence in enumerate(call.sequences)}
        queue = self._wait_for(call.sequences)
        try:
            await self.on_model(lambda: self.core.submit(call.sequences))
            response = await _open_stream(request)
            left = len(places)
            while left:
                ended = [await queue.get()]
                while not queue.empty():
                    ended.append(queue.get_nowait())
                finished = [places[request_id] for request_id, _, _ in ended]
                answers = (self._answer(call, call.sequences[place]) | {"index": place} for place in finished)
                await response.write(b"".join(map(_event, answers)))
                left -= len(ended)
            return await _close_stream(response)
        finally:
            self._forget(call.sequences)

    async def abort_request(self, request: web.Request) -> web.Response:
        """POST /abort_request {rid | abort_all}."""
        body = await read_body(request)
        everything = body.get("abort_all", False)
        rid = body.get("rid")
        if everything is not True and (not isinstance(rid, str) or not rid):
            raise InvalidFieldError("rid", rid, "name a request, or set abort_all to true")
        count = await self.on_model(lambda: self.core.abort(None if everything else rid))
        return json_response({"success": True, "message": f"{count} request(s) aborted", "aborted": count})

    async def pause_generation(self, request: web.Request) -> web.Response:
        """POST /pause_generation {mode: abort | retract | in_place}; SGLang's default is abort."""
        body = await read_body(request)
        mode = body.get("mode", "abort")
        if mode not in list(PauseMode):
            raise InvalidFieldError("mode", mode, f"use one of {', '.join(PauseMode)}")
        await self.on_model(lambda: self.core.pause(PauseMode(mode)))
        return json_response({"success": True, "message": f"paused ({mode})"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """POST /continue_generation."""
        await self.on_model(self.core.resume)
        return json_response({"success": True, "message": "generating"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Forget all cached prefixes that no running request holds."""
        count = await self.on_model(lambda: self.core.scheduler.flush())
        return json_response({"success": True, "message": f"{count} cached tokens forgotten", "flushed": count})

    # -- facts --------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 while the model thread lives and its last step did not fail."""
        if self.core.failure is not None:
            return refusal(RuntimeError(f"a step failed: {self.core.failure}"), 503)
        return json_response({"success": True, "message": "ok"})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Sample one token; 200 when it came. While paused, that the model thread answers is enough."""
        paused = await self.on_model(lambda: self.core.scheduler.paused)
        if not paused:
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
            call = parse_generate(body, self.core.request_limits, self.core.codec, self._seeds.next)
            answer = (await self._complete(call))[0]
            if answer["meta_info"]["finish_reason"]["type"] == "abort":
                return refusal(RuntimeError(answer["meta_info"]["finish_reason"]["message"]), 503)
            self.core.failure = None
        return json_response({"success": True, "message": "ok"})

    async def model_info(self, request: web.Request) -> web.Response:
        """What is served."""
        return json_response(
            {
                "model_path": str(self.config.model_path),
                "is_generation": True,
                "weight_version": self.core.weight_version,
                "model_type": self.core.loaded.model.config.model_type,
                "vocab_size": self.core.loaded.vocab_size,
                "context_length": self.core.scheduler.limits.context_length,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        """Configuration, how the model is run, and live numbers."""
        state = await self.on_model(self.core.state)
        more = {"context_length": self.core.scheduler.limits.context_length}
        return json_response({**self.info, **state, **more, "weight_version": self.core.weight_version})

    async def get_weight_version(self, request: web.Request) -> web.Response:
        """The version of the weights that the next token is sampled under."""
        return json_response({"weight_version": self.core.weight_version})


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


def _event(answer: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"


async def _close_stream(response: web.StreamResponse) -> web.StreamResponse:
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
