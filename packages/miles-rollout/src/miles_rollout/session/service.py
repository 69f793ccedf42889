"""The session service: all sessions of a server, and requests on their way to a turn. It does not know HTTP."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from miles_contracts import InvalidFieldError, Trajectory, TrajectoryIdentity
from miles_rollout.renderers import Renderer
from miles_rollout.session.audit import SessionCounters
from miles_rollout.session.config import SessionConfig
from miles_rollout.session.context import ContextWindow
from miles_rollout.session.errors import BadRequestError, SessionLimitError, SessionNotFoundError
from miles_rollout.session.fields import UnknownFields
from miles_rollout.session.matching import load_matcher
from miles_rollout.session.metrics import Metrics
from miles_rollout.session.rawprefix import RawText
from miles_rollout.session.requests import (
    ChatRequest,
    CompletionRequest,
    OpenRequest,
    read_request,
)
from miles_rollout.session.responses import Answer
from miles_rollout.session.session import RenderChoice, Session
from miles_rollout.session.tree import SessionTree
from miles_rollout.session.turns import OnDelta, Turns
from miles_rollout.session.upstream import Sampler

R = TypeVar("R", ChatRequest, CompletionRequest)


class SessionService:
    """All sessions of a server.

    Args:
        sampler: where tokens come from (`EngineSampler`, `RouterSampler`).
        renderer: the model family's renderer.
        config: policies and limits.
        clock: monotonic seconds; tests bring their own.

    Attributes:
        context: room for prompt and completion; whoever knows engines tells it what they say.
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
        self.context = ContextWindow(self.config.max_context_tokens)
        self._sampler = sampler
        self._turns = Turns(sampler, renderer, self.config, self.context, self.metrics, clock)
        self._matcher = load_matcher(self.config.matcher)
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._unknown = UnknownFields()

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
            self._turns.renderer_for(render)
        try:
            identity = TrajectoryIdentity(
                prompt_index=request.prompt_index,
                member=request.member,
                attempt=request.attempt,
                session_id=(session_id := secrets.token_urlsafe(24)),
            )
        except InvalidFieldError as error:
            raise BadRequestError(str(error), param=error.field.rpartition(".")[2]) from error
        try:
            _ = request.sampling and request.sampling.transform
        except InvalidFieldError as error:
            raise BadRequestError(str(error), param=f"sampling.{error.field.rpartition('.')[2]}") from error
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
        request = self._read(session, body, ChatRequest)
        raw = RawText.of(body, request.messages)
        return await self._turns.chat(session, request, raw, on_delta if request.stream else None), request

    async def complete(
        self, session_id: str, body: bytes, on_delta: OnDelta | None = None
    ) -> tuple[Answer, CompletionRequest]:
        """Serve one text completion whose prompt is token ids; arguments and errors as of `chat`."""
        session = self.get(session_id)
        request = self._read(session, body, CompletionRequest)
        return await self._turns.complete(session, request, on_delta if request.stream else None), request

    def _read(self, session: Session, body: bytes, kind: type[R]) -> R:
        request, unknown = read_request(body, kind)
        if unknown:
            session.count(SessionCounters(ignored_fields=self._unknown.note(unknown, session.id)))
        return request
