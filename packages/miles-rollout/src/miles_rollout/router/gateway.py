"""SGLang's own router in front of the engines: it places the turns, and what may serve is still decided here.

    turn --(header with the session's key)--> sglang-router --> one of its workers
    health, versions, pause, weights --------------------------> each engine directly

`sglang-router` is a process. Its list of workers is kept equal to the engines that this router would let serve: one
that died, hangs or has old weights is taken off it, one that is back is put on it again. A turn that fails is issued
again under the same key; sglang-router by then has put the session on another worker.

It rewrites every request into the fields that it knows, and expert choices are not among them: what they are needed
for cannot go through it. Nor does it say which worker answered: hit rates are those of the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.metadata
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from miles_contracts import (
    DeadlineExceededError,
    Engine,
    EngineError,
    EngineUnavailableError,
    GenerateResult,
    InvalidFieldError,
    SamplingParams,
)
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.engine_http import EngineHttp
from miles_rollout.engine_stream import OnPartial, generate_on
from miles_rollout.router.counts import EngineCounts, RouterCounts
from miles_rollout.router.router import Router, RouterConfig

_log = logging.getLogger(__name__)
MODULE = "sglang_router.launch_router"
"""What the process runs."""
SUPPORTED = ((0, 3, 2), (0, 4))
"""Versions from the first to below the second."""
KEY_HEADER = "X-SMG-Routing-Key"
_CONTROL_S = 30.0
_BACKOFF_S = 0.1
_key: contextvars.ContextVar[str | None] = contextvars.ContextVar("routing key", default=None)


def require_gateway() -> str:
    """The installed version of sglang-router.

    Raises:
        InvalidFieldError: it is not installed, or of a version that this release does not know.
    """
    first, below = (".".join(map(str, v)) for v in SUPPORTED)
    remedy = f"pip install 'sglang-router>={first},<{below}'"
    try:
        version = importlib.metadata.version("sglang-router")
    except importlib.metadata.PackageNotFoundError:
        raise InvalidFieldError("router", "sglang", f"sglang-router is not installed: {remedy}") from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise InvalidFieldError("router", f"sglang-router {version}", f"this version is not known: {remedy}")
    return version


def gateway_arguments(host: str, port: int, metrics_port: int) -> list[str]:
    """Command line of `MODULE`: sticky sessions, first placed where least is running; no retries of its own."""
    return [
        *("--host", host, "--port", str(port), "--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *("--policy", "manual", "--assignment-mode", "min_load"),
        # Turns are issued again here, where they are counted, and engines are judged here.
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
        *("--request-timeout-secs", "86400", "--log-level", "warn"),
    ]


class GatewayClient(EngineClient):
    """The process as an engine that samples: turns carry the key of their session.

    Args:
        url: base URL.
        deadlines: longest waits.
    """

    def __init__(self, url: str, *, deadlines: Deadlines | None = None) -> None:
        super().__init__(url, deadlines=deadlines)
        self._http.headers = _headers


def _headers() -> dict[str, str]:
    key = _key.get()
    return {} if key is None else {KEY_HEADER: key}


class Workers:
    """The list of workers of a running process.

    Args:
        url: base URL.
    """

    def __init__(self, url: str) -> None:
        self._http = EngineHttp(url, _CONTROL_S)

    async def close(self) -> None:
        """Close the connection pool; idempotent."""
        await self._http.close()

    async def move_to(self, url: str) -> None:
        """The process was started again and answers at `url` from now on."""
        await self._http.move_to(url)

    async def ready(self) -> bool:
        """Whether the process answers."""
        try:
            await self._http.call("GET", "/liveness", None, "sglang-router", _CONTROL_S)
        except (EngineError, DeadlineExceededError):
            return False
        return True

    async def listed(self) -> dict[str, str]:
        """URL and id of every worker.

        Raises:
            EngineError, DeadlineExceededError: no answer, or none that makes sense.
        """
        answer: Any = await self._http.call("GET", "/workers", None, "the list of workers", _CONTROL_S)
        try:
            return {str(w["url"]).rstrip("/"): str(w["id"]) for w in answer["workers"]}
        except (TypeError, KeyError) as error:
            raise EngineError(self._http.url, f"its list of workers is none: {answer!r:.200}") from error

    async def make_equal(self, urls: Sequence[str]) -> None:
        """Add and remove workers until there are exactly `urls`.

        Raises: as `listed`; DeadlineExceededError also when a change does not take effect.
        """
        wanted = set(urls)
        try:
            async with asyncio.timeout(_CONTROL_S):
                asked: set[str] = set()
                while (listed := await self.listed()).keys() != wanted:
                    for url in wanted - listed.keys() - asked:
                        await self._http.call("POST", "/workers", {"url": url}, f"adding {url}", _CONTROL_S)
                    for url in listed.keys() - wanted - asked:
                        await self._http.call("DELETE", f"/workers/{listed[url]}", None, f"removing {url}", _CONTROL_S)
                    asked |= wanted ^ listed.keys()
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise DeadlineExceededError("sglang-router's list of workers", _CONTROL_S, "look at its log") from error


class GatewayRouter(Router):
    """A router whose turns go through sglang-router.

    Args:
        engines: what may serve, for health checks and versions; their URLs are the workers.
        gateway: where turns go (a `GatewayClient`, or something around one).
        workers: the process's list of workers.
        keeps_workers: this router keeps the list equal to what may serve; only one router of a process does.
        prefix: put before every key, so that two routers on one process have sessions of their own.
        config: deadlines and limits; `placement` has no meaning here.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        gateway: Engine,
        *,
        workers: Workers,
        keeps_workers: bool = True,
        prefix: str = "",
        config: RouterConfig | None = None,
    ) -> None:
        super().__init__(engines, config=config)
        self._gateway = gateway
        self._workers = workers
        self._keeps_workers = keeps_workers
        self._prefix = prefix
        self._outstanding = 0
        self._answered = EngineCounts()
        self._agreeing = asyncio.Lock()
        self._agree_soon: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Tell sglang-router its workers and begin the health checks.

        Raises:
            EngineError, DeadlineExceededError: sglang-router does not answer.
        """
        if self._keeps_workers:
            async with self._agreeing:
                await self._workers.make_equal([engine.url for engine in self.serving])
        await super().start()

    async def close(self) -> None:
        """End the health checks. Neither engines nor sglang-router are touched."""
        await super().close()
        if self._agree_soon is not None:
            self._agree_soon.cancel()
            await asyncio.gather(self._agree_soon, return_exceptions=True)

    async def check_health(self) -> None:
        """Probe all engines at once; then sglang-router's list says what they said."""
        await super().check_health()
        await self._agree()

    def quarantine(self, url: str, reason: str) -> None:
        """Take an engine out of service, and off sglang-router's list."""
        super().quarantine(url, reason)
        if self._keeps_workers and (self._agree_soon is None or self._agree_soon.done()):
            self._agree_soon = asyncio.create_task(self._agree(), name="gateway-workers")

    async def _agree(self) -> None:
        """Make the list of workers what may serve; what does not succeed is tried again with the next check."""
        if not self._keeps_workers:
            return
        async with self._agreeing:
            try:
                await self._workers.make_equal([engine.url for engine in self.serving])
            except (EngineError, DeadlineExceededError) as error:
                _log.warning("sglang-router could not be told its workers: %s", error)

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
        """Sample after `input_ids` on the worker of session `key`.

        Raises:
            EngineError: the request was refused (4xx), or every issue of it failed.
            DeadlineExceededError: the turn took too long, or no engine served for `no_engine_s`.
            InvalidFieldError: expert choices were asked for.
        """
        if routing:
            raise InvalidFieldError("routing", True, "sglang-router drops expert choices; use the own router for them")
        tokens = len(input_ids) + params.max_new_tokens
        passed_on = False

        def watch(ids: Any) -> bool:
            nonlocal passed_on
            assert on_partial is not None
            passed_on = on_partial(ids) or passed_on
            return passed_on

        for issue in range(1 + self._config.max_reissues):
            await self._some_serves()
            self._outstanding += tokens
            try:
                result = await self._issue(key, input_ids, params, watch if on_partial is not None else None)
            except EngineError as error:
                refused = error.status is not None and 400 <= error.status < 500 and error.status not in (404, 408, 429)
                unavailable = isinstance(error, EngineUnavailableError)
                if issue == self._config.max_reissues or passed_on or (refused and not unavailable):
                    raise
                self._reissued += 1
                if unavailable:
                    await self._gateway_answers()
                # Whoever is to blame is found by the checks; until then the session may still be placed there.
                await asyncio.sleep(_BACKOFF_S * 2**issue)
                await self.check_health()
                continue
            finally:
                self._outstanding -= tokens
            seen = result.cached_tokens is not None
            self._answered = EngineCounts(
                turns=self._answered.turns + 1,
                prompt_tokens=self._answered.prompt_tokens + (len(input_ids) if seen else 0),
                cached_tokens=self._answered.cached_tokens + (result.cached_tokens or 0),
            )
            return result
        raise AssertionError("unreachable: the last issue returns or raises")

    async def _issue(
        self, key: str, input_ids: Sequence[int], params: SamplingParams, on_partial: OnPartial | None
    ) -> GenerateResult:
        """One issue of a turn; it is aborted on the engines when it takes too long or nobody wants it any more."""
        request_id = uuid.uuid4().hex
        token = _key.set(self._prefix + key)
        done = False
        try:
            async with asyncio.timeout(self._config.turn_deadline_s):
                result = await generate_on(
                    self._gateway, input_ids, params, request_id=request_id, routing=False, on_partial=on_partial
                )
            done = True
            return result
        except TimeoutError as error:
            remedy = "raise turn_deadline_s, or shorten answers"
            raise DeadlineExceededError("a turn", self._config.turn_deadline_s or 0.0, remedy) from error
        except EngineError:
            done = True
            raise
        finally:
            with contextlib.suppress(ValueError):  # closed in another context
                _key.reset(token)
            if not done:
                for engine in self.serving:
                    self._abort(engine, request_id)

    async def _some_serves(self) -> None:
        try:
            async with asyncio.timeout(self._config.no_engine_s):
                await self._serving.wait()
        except TimeoutError as error:
            reasons = "; ".join(f"{url}: {why}" for url, why in self.quarantined.items())
            raise DeadlineExceededError(
                f"an engine that serves ({reasons})", self._config.no_engine_s, "restart the engines"
            ) from error

    async def _gateway_answers(self) -> None:
        """Wait until the process is there (again)."""
        try:
            async with asyncio.timeout(self._config.no_engine_s):
                while not await self._workers.ready():  # noqa: ASYNC110 - it happens in another process
                    await asyncio.sleep(_BACKOFF_S)
        except TimeoutError as error:
            raise DeadlineExceededError("sglang-router", self._config.no_engine_s, "look at its log") from error

    def _now(self) -> dict[str, float]:
        return super()._now() | {"router/outstanding_tokens": float(self._outstanding)}

    def _counts(self) -> RouterCounts:
        return RouterCounts(reissued=self._reissued, quarantines=self._quarantined, engines=(self._answered,))
