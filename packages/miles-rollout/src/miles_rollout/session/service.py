"""The session service: requests in, committed turns out. It knows tokens and messages, not HTTP.

A turn is four steps, and only the last one writes:

    plan (match the history)  ->  render the suffix  ->  sample (the only wait)  ->  commit

so whatever fails, the session is as it was.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError, Message, SamplingParams, Trajectory, TrajectoryIdentity
from miles_rollout.engine_stream import OnPartial
from miles_rollout.renderers import Renderer
from miles_rollout.session import audit
from miles_rollout.session.audit import SessionCounters
from miles_rollout.session.config import SessionConfig
from miles_rollout.session.errors import (
    BadRequestError,
    SessionBusyError,
    SessionLimitError,
    SessionNotFoundError,
    UpstreamError,
)
from miles_rollout.session.live import Delta, LiveView
from miles_rollout.session.matching import load_matcher
from miles_rollout.session.messages import assistant_message
from miles_rollout.session.metrics import Metrics
from miles_rollout.session.nodes import Generation, Node
from miles_rollout.session.prompting import cut_at_stop, render_choice, render_prompt, turn_seed
from miles_rollout.session.requests import (
    ChatRequest,
    CompletionRequest,
    OpenRequest,
    SamplingFields,
    choice_is_forced,
    decode_body,
    fit_context,
    refuse_unsupported,
    resolve_sampling,
)
from miles_rollout.session.responses import Answer
from miles_rollout.session.session import RenderChoice, Session
from miles_rollout.session.tree import Plan, Policy, SessionTree
from miles_rollout.session.upstream import Sampler, call, check

OnDelta = Callable[[ChatRequest, Delta], None]
"""Takes the next piece of a turn that is being sampled, with the request it answers."""
_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)


class SessionService:
    """All sessions of a server.

    Args:
        sampler: where tokens come from (`EngineSampler`, `RouterSampler`).
        renderer: the model family's renderer.
        config: policies and limits.
        clock: monotonic seconds; tests bring their own.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        config: SessionConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or SessionConfig()
        self.metrics = Metrics()
        self._sampler = sampler
        self._renderer = renderer
        self._matcher = load_matcher(self.config.matcher)
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._stops = tuple(renderer.stop_token_ids)

    # -- sessions -------------------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def open(self, request: OpenRequest | None = None) -> Session:
        """Make a session.

        Raises:
            SessionLimitError: the server is full of sessions that are in use.
            BadRequestError: a bad setting.
        """
        request = request or OpenRequest()
        if len(self._sessions) >= self.config.max_sessions:
            self.sweep()
        if len(self._sessions) >= self.config.max_sessions:
            raise SessionLimitError(
                f"{len(self._sessions)} sessions are open, the limit; delete sessions that are over, "
                "or raise max_sessions"
            )
        render = None
        if request.thinking is not None or request.reasoning_effort is not None:
            render = RenderChoice(thinking=request.thinking, reasoning_effort=request.reasoning_effort)
            self._renderer_for(render)
        try:
            identity = TrajectoryIdentity(
                prompt_index=request.prompt_index,
                member=request.member,
                attempt=request.attempt,
                session_id=(session_id := secrets.token_urlsafe(24)),
            )
            _ = request.sampling and request.sampling.transform
        except InvalidFieldError as error:
            raise BadRequestError(str(error), param=error.field) from error
        tree = SessionTree(
            request.policy or self.config.policy,
            self._matcher,
            repairs=self.config.repairs if request.repairs is None else request.repairs,
            max_nodes=self.config.max_nodes,
        )
        session = Session(
            session_id,
            tree,
            identity=identity,
            pinned=request.sampling,
            render=render,
            metadata=request.metadata,
            now=self._clock(),
        )
        self._sessions[session_id] = session
        self.metrics.add("sessions_opened_total")
        return session

    def get(self, session_id: str) -> Session:
        """The session, which counts as used.

        Raises:
            SessionNotFoundError: no such session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(
                "no such session: it was never opened, was deleted, or was idle for more than "
                f"{self.config.idle_timeout_s:g} s"
            )
        session.last_used = self._clock()
        return session

    def close(self, session_id: str) -> None:
        """Forget a session; requests that it is serving are cancelled.

        Raises:
            SessionNotFoundError: no such session.
        """
        session = self.get(session_id)
        del self._sessions[session_id]
        session.closed = True
        for task in session.in_flight:
            task.cancel()
        self._sampler.forget(session_id)
        self.metrics.close_session(session.counters())

    def sweep(self) -> int:
        """Close sessions that were idle for too long; returns how many."""
        deadline = self._clock() - self.config.idle_timeout_s
        stale = [s.id for s in self._sessions.values() if not s.in_flight and s.last_used < deadline]
        for session_id in stale:
            self.close(session_id)
        self.metrics.add("sessions_expired_total", len(stale))
        return len(stale)

    def close_all(self) -> None:
        """Close every session."""
        for session_id in list(self._sessions):
            self.close(session_id)

    def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        """What a session's turns are to a trainer, one trajectory per leaf.

        Raises:
            SessionNotFoundError: no such session.
        """
        return self.get(session_id).trajectories(self.config.num_experts)

    def metrics_text(self) -> str:
        """Prometheus text of everything since the start."""
        counters = sum((s.counters() for s in self._sessions.values()), SessionCounters())
        return self.metrics.text(len(self._sessions), counters)

    # -- turns ----------------------------------------------------------------------------------------------

    async def chat(self, session_id: str, body: bytes, on_delta: OnDelta | None = None) -> tuple[Answer, ChatRequest]:
        """Serve one chat completion.

        Args:
            session_id: the session.
            body: the request.
            on_delta: takes pieces of the answer while it is sampled, if the request asks for a stream; they come
                before the turn is verified and committed, and the committed content begins with them.

        Raises:
            SessionError: whatever went wrong; the session is unchanged.
        """
        session = self.get(session_id)
        request = decode_body(body, _CHAT)
        refuse_unsupported(request)
        async with self._turn(session):
            return await self._chat(session, request, on_delta if request.stream else None), request

    async def _chat(self, session: Session, request: ChatRequest, on_delta: OnDelta | None) -> Answer:
        forced = choice_is_forced(request.tool_choice)
        if forced and not self.config.best_effort_tool_choice:
            raise BadRequestError(
                f"tool_choice: got {request.tool_choice!r}, but sampling is not constrained; send 'auto', "
                "or start the server with best-effort tool choice",
                param="tool_choice",
            )
        render = session.choose_render(render_choice(request))
        renderer = self._renderer_for(render)
        tools = session.tools(bytes(request.tools))
        raw = bytes(request.messages)
        plan, num_messages = session.plan(raw, tools)
        params, overridden = self._sampling(session, request)
        stored = plan.history_ids()
        history = stored.tolist()
        suffix = render_prompt(renderer, plan, history)
        new_ids = np.asarray(suffix, dtype=np.int32)
        # Without tools to call, a call becomes content together with all that stands before it: only the end tells.
        view = None
        if on_delta is not None and self.config.live_streams and request.tool_choice != "none":
            view = LiveView(renderer, params.stop, partial(on_delta, request))
        sampled, params = await self._sample(
            session,
            np.concatenate((stored, new_ids)),
            history + suffix,
            len(stored),
            params,
            on_partial=None if view is None else view.advance,
        )

        parsed = renderer.parse(sampled.output_ids.tolist(), tools)
        if view is not None:
            parsed = view.settle(parsed, sampled.output_ids.tolist())
        content, calls = parsed.content, parsed.tool_calls
        if request.tool_choice == "none" and calls:
            content, calls = renderer.decode(sampled.output_ids.tolist()), ()
        reply = assistant_message(
            cut_at_stop(content, params.stop) if not calls else content, parsed.reasoning_content, calls
        )
        node = _commit(session, plan, new_ids, sampled, reply, params, render)
        session.remember(raw, node, num_messages)
        if overridden or forced or parsed.malformed:
            session.count(
                SessionCounters(
                    sampling_overrides=int(overridden),
                    forced_tool_choices=int(forced),
                    malformed_calls=len(parsed.malformed),
                )
            )
        self._count_turn(len(suffix), sampled)
        return Answer(
            session_id=session.id,
            model=request.model,
            node=node,
            prompt_tokens=len(history) + len(suffix),
            malformed=parsed.malformed,
            token_texts=self._token_texts(sampled) if request.logprobs else None,
        )

    async def complete(self, session_id: str, body: bytes) -> tuple[Answer, CompletionRequest]:
        """Serve one text completion whose prompt is token ids.

        Raises:
            SessionError: whatever went wrong; the session is unchanged.
        """
        session = self.get(session_id)
        request = decode_body(body, _COMPLETION)
        refuse_unsupported(request)
        prompt = self._prompt_ids(request)
        async with self._turn(session):
            plan, suffix = session.tree.plan_ids(prompt)
            params, overridden = self._sampling(session, request)
            sampled, params = await self._sample(session, prompt, prompt.tolist(), len(prompt) - len(suffix), params)
            node = _commit(session, plan, suffix, sampled, None, params, session.render)
            if overridden:
                session.count(SessionCounters(sampling_overrides=1))
            self._count_turn(len(suffix), sampled)
            answer = Answer(
                session_id=session.id,
                model=request.model,
                node=node,
                prompt_tokens=len(prompt),
                token_texts=self._token_texts(sampled) if request.logprobs is not None else None,
                text=cut_at_stop(self._renderer.decode(sampled.output_ids.tolist()), params.stop),
            )
            return answer, request

    def _prompt_ids(self, request: CompletionRequest) -> NDArray[np.int32]:
        prompt: Any = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
        if not isinstance(prompt, list) or not all(isinstance(i, int) for i in prompt):
            raise BadRequestError(
                "prompt: send token ids (one list of integers), text has no exact ids", param="prompt"
            )
        size = self._renderer.vocab_size
        bad = next((i for i in prompt if not 0 <= i < size), None)
        if bad is not None:
            raise BadRequestError(f"prompt: token id {bad} leaves [0, {size})", param="prompt")
        return np.asarray(prompt, dtype=np.int32)

    @asynccontextmanager
    async def _turn(self, session: Session) -> AsyncIterator[None]:
        """One request at a time on a linear session; any number on a branching one."""
        task = asyncio.current_task()
        assert task is not None
        alone = session.tree.policy is Policy.LINEAR
        if alone and session.lock.locked() and not self.config.wait_when_busy:
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
        prompt: NDArray[np.int32],
        prompt_ids: list[int],
        stored: int,
        params: SamplingParams,
        on_partial: OnPartial | None = None,
    ) -> tuple[Generation, SamplingParams]:
        """Ask the engine; `prompt` and `prompt_ids` are the same ids in the two forms that are needed."""
        params = fit_context(params, len(prompt), self.config.max_context_tokens)
        name = f"{session.id[:8]}-{secrets.token_hex(8)}"
        started = self._clock()
        # Earlier turns hold the rows of all tokens that were fed then, all but the last of those stored.
        first_row = max(stored - 1, 0)
        try:
            result = await call(
                self._sampler,
                session.id,
                prompt_ids,
                params,
                request_id=name,
                routing=self.config.record_routing,
                routing_start=first_row,
                timeout_s=self.config.engine_timeout_s,
                on_partial=on_partial,
            )
        finally:
            self.metrics.observe("engine_seconds", self._clock() - started)
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
                routing=self.config.record_routing,
                num_experts=self.config.num_experts,
                routing_start=first_row,
            )
            if name in session.records:
                raise UpstreamError(f"engine answer: request id {name!r} was used before in this session")
        except UpstreamError:
            session.count(SessionCounters(discarded_turns=1, discarded_tokens=_length(result.output_ids)))
            raise
        session.records[name] = audit.record(
            name, np.asarray(prompt, dtype=np.int32), sampled.output_ids, sampled.logprobs
        )
        return sampled, params

    def _sampling(self, session: Session, request: SamplingFields) -> tuple[SamplingParams, bool]:
        params, overridden = resolve_sampling(
            request,
            pinned=session.pinned,
            fixed=session.transform,
            default_max_tokens=self.config.default_max_tokens,
            stop_token_ids=self._stops,
        )
        if request.seed is None and params.seed is not None:
            # A pinned seed stands for the episode: every turn, and every retry of a turn, draws anew.
            params = msgspec.structs.replace(params, seed=turn_seed(params.seed, len(session.tree.nodes)))
        return params, overridden

    def _renderer_for(self, choice: RenderChoice) -> Renderer:
        changes = {f: v for f in ("thinking", "reasoning_effort") if (v := getattr(choice, f)) is not None}
        if not changes:
            return self._renderer
        try:
            return self._renderer.with_options(**changes)
        except InvalidFieldError as error:
            raise BadRequestError(str(error), param=error.field) from error

    def _token_texts(self, sampled: Generation) -> tuple[str, ...]:
        decode = self._renderer.decode
        return tuple(decode([int(i)], skip_special_tokens=False) for i in sampled.output_ids)

    def _count_turn(self, new_prompt_tokens: int, sampled: Generation) -> None:
        self.metrics.add("turns_total")
        self.metrics.add("new_prompt_tokens_total", new_prompt_tokens)
        self.metrics.add("sampled_tokens_total", len(sampled.output_ids))
        self.metrics.add("cached_tokens_total", sampled.cached_tokens or 0)


def _commit(
    session: Session,
    plan: Plan,
    prompt_ids: NDArray[np.int32],
    sampled: Generation,
    reply: Message | None,
    params: SamplingParams,
    render: RenderChoice | None,
) -> Node:
    """Write a turn; a turn that cannot be written any more is counted as discarded."""
    try:
        session.settle(params.transform, render)
        return session.tree.commit(plan, prompt_ids, sampled, reply)
    except SessionBusyError:
        session.count(SessionCounters(discarded_turns=1, discarded_tokens=len(sampled.output_ids)))
        raise


def _length(ids: Any) -> int:
    try:
        return len(ids)
    except TypeError:
        return 0
