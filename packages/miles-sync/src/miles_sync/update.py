"""Runs the transaction against real engines: requests, deadlines, overlap, and settlement whatever happens.

The driver's side of weight synchronisation; imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from miles_contracts import (
    DeadlineExceededError,
    Engine,
    EngineError,
    EngineUnavailableError,
    InvalidFieldError,
    PauseMode,
    WeightManifest,
    WeightUpdateError,
)
from miles_sync.report import UpdateReport
from miles_sync.transaction import Answer, Decision, Fault, Phase, Transaction

DEFAULT_SETTLE_S = 30.0

UNACKNOWLEDGED = 2
"""Buckets that a source may have handed out, or be filling, before the first of them is acknowledged."""


class UpdateSource(Protocol):
    """The driver's view of the trainer: where the buckets of an update come from."""

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        """Open an update of this version: its id, unique for ever, and its metadata."""

    def buckets(self, update_id: str) -> AsyncIterator[Any]:
        """The buckets in order, of the type that the engines' `load_bucket` takes; at most two are unacknowledged."""

    async def acknowledge(self, update_id: str, index: int) -> None:
        """Every engine has loaded this bucket; its memory may go."""

    async def release(self, update_id: str) -> None:
        """The update is over, committed or not. An update whose `begin` got lost is never released: begin drops it."""


class Canary(Protocol):
    """Probes one engine; raise `WeightUpdateError` when its answer is not what the new policy should say."""

    async def prepare(self, engine: Engine) -> None:
        """Before the pause: remember what the old policy answers."""

    async def check(self, engine: Engine) -> None:
        """After the commit, on a running engine: compare."""


class FleetFencedError(WeightUpdateError):
    """The update went through, or back, on some engines and the others are fenced: paused, dead or out of reach.

    Attributes:
        report: what happened; `serving` are consistent and running, `fenced` must be restarted or updated again.
        committed: True when `serving` have the new version.
    """

    def __init__(self, fault: Fault, report: UpdateReport, committed: bool) -> None:
        super().__init__(fault.reason, engine=fault.engine, tensor=fault.tensor)
        version = f"version {report.version}" if committed else "the previous version"
        running = f"{len(report.serving)} engine(s) serve {version}" if report.serving else "no engine is serving"
        tensor = f", tensor {fault.tensor}" if fault.tensor else ""
        where = f"{fault.engine}{tensor}: " if fault.engine else ""
        self.args = (f"weight update: {where}{fault.reason}; {running}, fenced: {', '.join(report.fenced)}",)
        self.report = report
        self.committed = committed


async def update_weights(
    engines: Sequence[Engine],
    source: UpdateSource,
    *,
    version: int,
    mode: PauseMode,
    deadline_s: float,
    settle_s: float = DEFAULT_SETTLE_S,
    canary: Canary | None = None,
    in_flight: int = 1,
) -> UpdateReport:
    """Bring all engines to `version`, or leave all at what they serve.

    A cancelled call still settles the fleet before it raises. A request that may have been lost is sent once more:
    every step is idempotent by its update id.

    Args:
        engines: the fleet; urls unique.
        source: the trainer.
        version: number of optimiser updates in the new weights.
        mode: what happens to running requests meanwhile.
        deadline_s: for everything before the commit.
        settle_s: for the commit round, each round after it, and each round of going back.
        canary: probes every engine after the commit.
        in_flight: buckets announced to an engine before it has answered for the first of them: 1, or 2 for engines
            that put them in order; their work is then not held up by the way of the requests.

    Returns:
        The report of an update that went through on every engine.

    Raises:
        FleetFencedError: some engines are at the outcome and serve it, others are fenced.
        WeightUpdateError: rolled back everywhere; names engine, tensor and reason.
        InvalidFieldError: no engines, two of one url, a time that is not positive, or `in_flight` is not 1 or 2.
    """
    for name, value in (("deadline_s", deadline_s), ("settle_s", settle_s)):
        if not value > 0:
            raise InvalidFieldError(name, value, "give a positive number of seconds")
    if not 1 <= in_flight <= UNACKNOWLEDGED:
        raise InvalidFieldError("in_flight", in_flight, f"use 1 to {UNACKNOWLEDGED}")
    run = _Update(engines, source, version, mode, deadline_s, settle_s, canary, in_flight)
    return await run.run()


class _Update:
    """One update under way."""

    def __init__(
        self,
        engines: Sequence[Engine],
        source: UpdateSource,
        version: int,
        mode: PauseMode,
        deadline_s: float,
        settle_s: float,
        canary: Canary | None,
        in_flight: int,
    ) -> None:
        self._in_flight = in_flight
        self._engines = {engine.url: engine for engine in engines}
        self._transaction = Transaction([e.url for e in engines], version, canary=canary is not None)
        self._source, self._version, self._mode, self._canary = source, version, mode, canary
        self._deadline_s, self._settle_s = deadline_s, settle_s
        self._started = time.perf_counter()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._times: dict[Phase, float] = {}
        self._update_id = ""
        self._manifest: WeightManifest | None = None
        self._num_buckets = 0
        self._cause: Exception | None = None

    async def run(self) -> UpdateReport:
        cancelled = False
        try:
            while self._transaction.phase not in (Phase.COMMIT, Phase.ROLLBACK, Phase.DONE):
                await self._round()
        except asyncio.CancelledError:
            cancelled = True
            self._transaction.fail("the update was cancelled")
        # From here on a cancellation may not leave engines paused or the fleet undecided.
        settlement = asyncio.create_task(self._settle())
        while not settlement.done():
            try:
                await asyncio.shield(settlement)
            except asyncio.CancelledError:
                cancelled = True
        settlement.result()
        if cancelled:
            raise asyncio.CancelledError
        return self._outcome()

    async def _settle(self) -> None:
        while self._transaction.phase is not Phase.DONE:
            await self._round()
        if self._update_id:
            await self._tell_source("release", self._source.release(self._update_id))

    async def _round(self) -> None:
        phase, begun = self._transaction.phase, time.perf_counter()
        if phase is Phase.PAUSE and self._paused_at is None:
            self._paused_at = begun
        if phase is Phase.TRANSFER:
            answers = await self._transfer()
        elif phase is Phase.BEGIN:
            answers = await self._begin()
        else:
            answers = await self._ask_all(phase, self._requests()[phase])
        if self._transaction.phase is phase:
            self._transaction.advance(answers)
        now = time.perf_counter()
        self._times[phase] = self._times.get(phase, 0.0) + now - begun
        if phase is Phase.RESUME and self._paused_at is not None:
            self._paused_s = now - self._paused_at

    def _requests(self) -> Mapping[Phase, Callable[[Engine], Awaitable[Answer]]]:
        async def inspect(engine: Engine) -> Answer:
            if self._canary is not None and self._transaction.phase is Phase.INSPECT:
                await self._canary.prepare(engine)
            return Answer(ok=True, version=await engine.weight_version())

        async def pause(engine: Engine) -> Answer:
            await engine.pause(self._mode)
            return Answer(ok=True)

        async def commit(engine: Engine) -> Answer:
            await engine.commit_weight_update(self._update_id)
            return Answer(ok=True)

        async def rollback(engine: Engine) -> Answer:
            if self._update_id:
                await engine.rollback_weight_update(self._update_id)
            return Answer(ok=True)

        async def probe(engine: Engine) -> Answer:
            await engine.resume()
            assert self._canary is not None
            await self._canary.check(engine)
            return Answer(ok=True)

        async def resume(engine: Engine) -> Answer:
            await engine.resume()
            return Answer(ok=True)

        return {
            Phase.INSPECT: inspect,
            Phase.PAUSE: pause,
            Phase.COMMIT: commit,
            Phase.CONFIRM: inspect,
            Phase.CANARY: probe,
            Phase.ROLLBACK: rollback,
            Phase.RESUME: resume,
        }

    def _seconds_left(self) -> float:
        if self._transaction.phase in (Phase.COMMIT, Phase.CONFIRM, Phase.CANARY, Phase.ROLLBACK, Phase.RESUME):
            return self._settle_s
        if self._transaction.decision is not Decision.OPEN:
            return self._settle_s
        return self._deadline_s - (time.perf_counter() - self._started)

    async def _ask_all(
        self, what: str, request: Callable[[Engine], Awaitable[Answer]], *, seconds: float | None = None
    ) -> dict[str, Answer]:
        targets = self._transaction.targets
        budget = self._seconds_left() if seconds is None else seconds
        answers = await asyncio.gather(*[self._ask(self._engines[url], what, request, budget) for url in targets])
        return dict(zip(targets, answers, strict=True))

    async def _ask(
        self, engine: Engine, what: str, request: Callable[[Engine], Awaitable[Answer]], seconds: float
    ) -> Answer:
        """One request to one engine, sent again once when no answer came. Never raises but for cancellation."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                try:
                    return await request(engine)
                except EngineUnavailableError:
                    return await request(engine)
        except TimeoutError as error:
            self._cause = error
            waited = DeadlineExceededError(f"{engine.url} to {what}", max(seconds, 0.0), "see the engine's log")
            return Answer(ok=False, reason=str(waited))
        except WeightUpdateError as error:
            self._cause = error
            return Answer(ok=False, refused=True, reason=error.reason, tensor=error.tensor)
        except EngineError as error:
            self._cause = error
            definite = error.status is not None and 400 <= error.status < 500
            return Answer(ok=False, refused=definite, reason=error.reason)
        except Exception as error:  # noqa: BLE001 - request boundary: whatever a client raises, the fleet is settled
            self._cause = error
            return Answer(ok=False, reason=f"{type(error).__name__}: {error}")

    async def _begin(self) -> dict[str, Answer]:
        try:
            async with asyncio.timeout(max(self._seconds_left(), 0.0)):
                self._update_id, manifest = await self._source.begin(self._version)
        except Exception as error:  # noqa: BLE001 - request boundary to the trainer, as above
            self._source_failed("to begin the update", error)
            return {}
        self._manifest = manifest
        if manifest.version != self._version:
            self._transaction.fail(f"the sender announced version {manifest.version}, {self._version} was asked for")
            return {}

        async def begin(engine: Engine) -> Answer:
            await engine.begin_weight_update(self._update_id, manifest)
            return Answer(ok=True)

        return await self._ask_all("begin the update", begin)

    async def _transfer(self) -> dict[str, Answer]:
        """Every bucket to every engine; the source fills the next one while the engines load this one."""
        answers = dict.fromkeys(self._transaction.targets, Answer(ok=True))
        buckets = aiter(self._source.buckets(self._update_id))
        coming: asyncio.Future[Any] | None = None
        loading: deque[tuple[int, asyncio.Task[dict[str, Answer]]]] = deque()
        ended = False
        try:
            while True:
                if coming is None and not ended and len(loading) < UNACKNOWLEDGED:
                    coming = asyncio.ensure_future(anext(buckets, None))
                if coming is not None and coming.done() and len(loading) < self._in_flight:
                    bucket, coming = coming.result(), None
                    ended = bucket is None
                    if not ended:
                        loading.append((bucket.index, asyncio.create_task(self._load(bucket))))
                elif loading and loading[0][1].done():
                    index, task = loading.popleft()
                    answers = task.result()
                    if not all(answer.ok for answer in answers.values()):
                        return answers
                    self._num_buckets += 1
                    await self._tell_source("acknowledge", self._source.acknowledge(self._update_id, index))
                elif loading or coming is not None:
                    waiting = {task for _, task in list(loading)[:1]} | {f for f in (coming,) if f and not f.done()}
                    # Engines that load have a deadline of their own, the same.
                    left = None if loading else max(self._seconds_left(), 0.0)
                    done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        raise TimeoutError
                else:
                    return answers
        except Exception as error:  # noqa: BLE001 - request boundary to the trainer, as above
            self._source_failed("for the next bucket", error)
            return {}
        finally:
            left_over = [task for _, task in loading] + ([coming] if coming is not None else [])
            for future in left_over:
                future.cancel()
            # Waits until the source has really stopped writing: its segments are released next.
            await asyncio.gather(*left_over, return_exceptions=True)

    async def _load(self, bucket: Any) -> dict[str, Answer]:
        async def load(engine: Engine) -> Answer:
            await engine.load_bucket(bucket)
            return Answer(ok=True)

        return await self._ask_all(f"load bucket {bucket.index} of update {self._update_id}", load)

    def _source_failed(self, waited_for: str, error: Exception) -> None:
        self._cause = error
        if isinstance(error, WeightUpdateError):
            self._transaction.fail(error.reason, error.tensor)
        elif isinstance(error, TimeoutError):
            reason = f"the deadline of {self._deadline_s:g} s passed while waiting for the sender {waited_for}"
            self._transaction.fail(reason)
        else:
            self._transaction.fail(f"the sender failed: {type(error).__name__}: {error}")

    async def _tell_source(self, what: str, call: Awaitable[None]) -> None:
        """Housekeeping that the outcome does not hang on; a failure is reported as a fault."""
        try:
            async with asyncio.timeout(self._settle_s):
                await call
        except Exception as error:  # noqa: BLE001 - request boundary to the trainer, as above
            reason = f"the sender failed to {what}: {type(error).__name__}: {error}"
            self._transaction.faults.append(Fault(phase=self._transaction.phase, engine=None, reason=reason))

    def _outcome(self) -> UpdateReport:
        transaction = self._transaction
        report = self._report()
        committed = transaction.decision is Decision.FORWARD
        if committed and not transaction.fenced:
            return report
        fault = transaction.faults[0]
        if transaction.fenced:
            raise FleetFencedError(fault, report, committed) from self._cause
        raise WeightUpdateError(fault.reason, engine=fault.engine, tensor=fault.tensor) from self._cause

    def _report(self) -> UpdateReport:
        transaction, times = self._transaction, self._times
        return UpdateReport(
            update_id=self._update_id,
            version=self._version,
            previous=dict(transaction.before),
            serving=transaction.serving,
            fenced=transaction.fenced,
            num_tensors=len(self._manifest.tensors) if self._manifest else 0,
            num_bytes=self._manifest.num_bytes if self._manifest else 0,
            num_buckets=self._num_buckets,
            pause_s=times.get(Phase.PAUSE, 0.0),
            begin_s=times.get(Phase.BEGIN, 0.0),
            transfer_s=times.get(Phase.TRANSFER, 0.0),
            commit_s=times.get(Phase.COMMIT, 0.0),
            verify_s=times.get(Phase.CONFIRM, 0.0),
            canary_s=times.get(Phase.CANARY, 0.0),
            resume_s=times.get(Phase.RESUME, 0.0),
            paused_s=self._paused_s,
            total_s=time.perf_counter() - self._started,
            faults=tuple(transaction.faults),
        )
