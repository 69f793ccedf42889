"""One turn of a session, from a request to a committed node. It knows tokens and messages, not HTTP.

A turn is four steps, and only the last one writes:

    plan (match the history)  ->  render the suffix  ->  sample (the only wait)  ->  commit

so whatever fails, the session is as it was.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError, Message, SamplingParams
from miles_rollout.engine_stream import OnPartial
from miles_rollout.renderers import CallOpeningError, ForcedCall, Renderer
from miles_rollout.session import audit
from miles_rollout.session.audit import SessionCounters
from miles_rollout.session.config import SessionConfig
from miles_rollout.session.context import ContextWindow
from miles_rollout.session.errors import BadRequestError, SessionBusyError, SessionNotFoundError, UpstreamError
from miles_rollout.session.live import Delta, LiveText, LiveTurn, opened_chars
from miles_rollout.session.messages import assistant_message
from miles_rollout.session.metrics import Metrics
from miles_rollout.session.nodes import Generation, Node, path_prompt
from miles_rollout.session.prompting import cut_at_stop, other_calls, prompt_of, render_choice, render_prompt, turn_seed
from miles_rollout.session.rawprefix import RawText
from miles_rollout.session.requests import (
    ChatRequest,
    CompletionRequest,
    ForcedChoice,
    SamplingFields,
    fit_context,
    forced_choice,
    resolve_sampling,
)
from miles_rollout.session.responses import Answer
from miles_rollout.session.session import RenderChoice, Session
from miles_rollout.session.tree import Plan, Policy
from miles_rollout.session.upstream import Sampler, call, check
from miles_rollout.token_ids import TokenIds

OnDelta = Callable[[SamplingFields, Delta], None]
"""Takes the next piece of a turn that is being sampled, with the request it answers."""


class Turns:
    """Serves the turns of sessions.

    Args:
        sampler: where tokens come from.
        renderer: the model family's renderer.
        config: policies and limits.
        context: room for a prompt and its completion.
        metrics: where turns and waits are counted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        config: SessionConfig,
        context: ContextWindow,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._config = config
        self._context = context
        self._metrics = metrics
        self._clock = clock
        self._stops = tuple(renderer.stop_token_ids)

    async def chat(self, session: Session, request: ChatRequest, raw: RawText, on_delta: OnDelta | None) -> Answer:
        """Serve one chat completion; `raw` is the text of the request's messages.

        Raises:
            SessionError: whatever went wrong; the session is unchanged.
        """
        async with self._turn(session):
            return await self._chat(session, request, raw, on_delta)

    async def complete(self, session: Session, request: CompletionRequest, on_delta: OnDelta | None) -> Answer:
        """Serve one text completion whose prompt is token ids.

        Raises:
            SessionError: whatever went wrong; the session is unchanged.
        """
        prompt = prompt_of(request, self._renderer.vocab_size)
        async with self._turn(session):
            return await self._complete(session, request, prompt, on_delta)

    def renderer_for(self, choice: RenderChoice) -> Renderer:
        """The renderer with these options.

        Raises:
            BadRequestError: the family does not have them.
        """
        changes = {f: v for f in ("thinking", "reasoning_effort") if (v := getattr(choice, f)) is not None}
        if not changes:
            return self._renderer
        try:
            return self._renderer.with_options(**changes)
        except InvalidFieldError as error:
            raise BadRequestError(str(error), param=error.field) from error

    async def _chat(self, session: Session, request: ChatRequest, raw: RawText, on_delta: OnDelta | None) -> Answer:
        render = session.choose_render(render_choice(request))
        renderer = self.renderer_for(render)
        tools = session.tools(bytes(request.tools))
        forced = forced_choice(request.tool_choice, tools)
        plan, num_messages = session.plan(raw, tools)
        params, overridden = self._sampling(session, request)
        stored = path_prompt(plan.parent)
        prompt, served_as_auto = self._prompt(renderer, plan, stored, forced)
        new_ids = np.asarray(prompt.ids, dtype=np.int32)
        want_calls = request.tool_choice != "none"
        view = None
        if on_delta is not None and self._config.live_streams:
            emit = partial(on_delta, request)
            view = LiveTurn(renderer, params.stop, emit, calls=want_calls, opening=prompt.opening)
        asked = params.max_new_tokens
        sampled, params = await self._sample(session, stored, new_ids, params, view.advance if view else None)

        output_ids = sampled.output_ids.tolist()
        parsed = renderer.parse(output_ids, tools, calls=want_calls, opening=prompt.opening)
        if view is not None:
            parsed = view.settle(parsed, output_ids)
        malformed = parsed.malformed + other_calls(forced, prompt, parsed.tool_calls)
        opened = opened_chars(parsed.content, renderer.vocabulary.decode(prompt.opening))
        content = parsed.content if parsed.tool_calls else cut_at_stop(parsed.content, params.stop, opened)
        reply = assistant_message(content, parsed.reasoning_content, parsed.tool_calls)
        node = _commit(session, plan, new_ids, sampled, reply, params, render, opening=len(prompt.opening))
        session.remember(raw, node, num_messages)
        if overridden or forced or malformed:
            session.count(
                SessionCounters(
                    sampling_overrides=int(overridden),
                    forced_calls=int(node.opening > 0),
                    relaxed_tool_choices=int(served_as_auto),
                    malformed_calls=len(malformed),
                )
            )
        self._count_turn(len(new_ids), sampled)
        return Answer(
            session_id=session.id,
            model=request.model,
            node=node,
            prompt_tokens=node.sampled_start,
            malformed=malformed,
            budget=params.max_new_tokens if params.max_new_tokens < asked else None,
            token_texts=self._token_texts(sampled) if request.logprobs else None,
        )

    def _prompt(
        self, renderer: Renderer, plan: Plan, stored: TokenIds, forced: ForcedChoice | None
    ) -> tuple[ForcedCall, bool]:
        """The new part of the prompt, and whether a forced choice is served as "auto"."""
        try:
            return render_prompt(renderer, plan, stored, forced), False
        except CallOpeningError as error:
            if self._config.best_effort_tool_choice:
                return render_prompt(renderer, plan, stored), True
            raise BadRequestError(
                f"tool_choice: a call cannot be opened for family {renderer.family}: {error}; force another tool, send "
                "'auto', or start the server with best-effort tool choice, which then serves it as 'auto'",
                param="tool_choice",
            ) from error

    async def _complete(
        self, session: Session, request: CompletionRequest, prompt: NDArray[np.int32], on_delta: OnDelta | None
    ) -> Answer:
        plan, suffix = session.tree.plan_ids(prompt)
        params, overridden = self._sampling(session, request)
        view = None
        if on_delta is not None and self._config.live_streams:
            view = LiveText(self._renderer, params.stop, partial(on_delta, request))
        stored = path_prompt(plan.parent)
        asked = params.max_new_tokens
        advance = view.advance if view else None
        sampled, params = await self._sample(session, stored, suffix, params, advance, "prompt")
        node = _commit(session, plan, suffix, sampled, None, params, session.render)
        if overridden:
            session.count(SessionCounters(sampling_overrides=1))
        self._count_turn(len(suffix), sampled)
        return Answer(
            session_id=session.id,
            model=request.model,
            node=node,
            prompt_tokens=len(prompt),
            budget=params.max_new_tokens if params.max_new_tokens < asked else None,
            token_texts=self._token_texts(sampled) if request.logprobs is not None else None,
            text=cut_at_stop(self._renderer.decode(sampled.output_ids.tolist()), params.stop),
        )

    @asynccontextmanager
    async def _turn(self, session: Session) -> AsyncIterator[None]:
        """One request at a time on a linear session; any number on a branching one."""
        task = asyncio.current_task()
        assert task is not None
        alone = session.tree.policy is Policy.LINEAR
        if alone and session.lock.locked() and not self._config.wait_when_busy:
            raise SessionBusyError(
                "another request of this session is being served; send one at a time, or use a branching session"
            )
        # Requests that are under way take a place as well: none may be refused after it was sampled.
        session.tree.check_room(len(session.in_flight))
        session.in_flight.add(task)
        try:
            if alone:
                async with session.lock:
                    yield
            else:
                yield
        except asyncio.CancelledError:
            if not session.closed:
                raise
            task.uncancel()
            raise SessionNotFoundError("the session was deleted while it served this request") from None
        finally:
            session.in_flight.discard(task)
            session.last_used = self._clock()

    async def _sample(
        self,
        session: Session,
        stored: TokenIds,
        new_ids: NDArray[np.int32],
        params: SamplingParams,
        on_partial: OnPartial | None,
        field: str = "messages",
    ) -> tuple[Generation, SamplingParams]:
        """Ask the engine what comes after the stored ids and the new ones, which `field` of the request brought."""
        prompt = stored.extended(new_ids)
        params = fit_context(params, len(prompt), self._context.tokens, field)
        name = f"{session.id[:8]}-{secrets.token_hex(8)}"
        started = self._clock()
        # Earlier turns hold the rows of all tokens that were fed then, all but the last of those stored.
        first_row = max(len(stored) - 1, 0)
        try:
            result = await call(
                self._sampler,
                session.id,
                prompt,
                params,
                request_id=name,
                routing=self._config.record_routing,
                routing_start=first_row,
                timeout_s=self._config.engine_timeout_s,
                on_partial=on_partial,
            )
        finally:
            self._metrics.observe("engine_seconds", self._clock() - started)
        if session.closed:
            raise SessionNotFoundError("the session was deleted while it served this request")
        name = result.request_id or name
        try:
            sampled = check(
                result,
                prompt_tokens=len(prompt),
                budget=params.max_new_tokens,
                stop_token_ids=frozenset(params.stop_token_ids),
                request_id=name,
                vocab_size=self._renderer.vocab_size,
                routing=self._config.record_routing,
                num_experts=self._config.num_experts,
                routing_start=first_row,
            )
            if name in session.records:
                raise UpstreamError(f"engine answer: request id {name!r} was used before in this session")
        except UpstreamError:
            session.count(SessionCounters(discarded_turns=1, discarded_tokens=_length(result.output_ids)))
            raise
        session.records[name] = audit.record(name, prompt, sampled.output_ids, sampled.logprobs)
        return sampled, params

    def _sampling(self, session: Session, request: SamplingFields) -> tuple[SamplingParams, bool]:
        size = self._renderer.vocab_size
        wrong = next((i for i in request.stop_token_ids or () if i >= size), None)
        if wrong is not None:
            raise BadRequestError(f"stop_token_ids: token id {wrong} leaves [0, {size})", param="stop_token_ids")
        params, overridden = resolve_sampling(
            request,
            pinned=session.pinned,
            fixed=session.transform,
            default_max_tokens=self._config.default_max_tokens,
            stop_token_ids=self._stops,
        )
        if request.seed is None and params.seed is not None:
            # A pinned seed stands for the episode: every turn, and every retry of a turn, draws anew.
            params = msgspec.structs.replace(params, seed=turn_seed(params.seed, len(session.tree.nodes)))
        return params, overridden

    def _token_texts(self, sampled: Generation) -> tuple[str, ...]:
        decode = self._renderer.decode
        return tuple(decode([int(i)], skip_special_tokens=False) for i in sampled.output_ids)

    def _count_turn(self, new_prompt_tokens: int, sampled: Generation) -> None:
        self._metrics.add("turns_total")
        self._metrics.add("new_prompt_tokens_total", new_prompt_tokens)
        self._metrics.add("sampled_tokens_total", len(sampled.output_ids))
        self._metrics.add("cached_tokens_total", sampled.cached_tokens or 0)


def _commit(
    session: Session,
    plan: Plan,
    prompt_ids: NDArray[np.int32],
    sampled: Generation,
    reply: Message | None,
    params: SamplingParams,
    render: RenderChoice | None,
    *,
    opening: int = 0,
) -> Node:
    """Write a turn; a turn that cannot be written any more is counted as discarded."""
    try:
        session.settle(params.transform, render)
        return session.tree.commit(plan, prompt_ids, sampled, reply, opening=opening)
    except SessionBusyError:
        session.count(SessionCounters(discarded_turns=1, discarded_tokens=len(sampled.output_ids)))
        raise


def _length(ids: Any) -> int:
    try:
        return len(ids)
    except TypeError:
        return 0
