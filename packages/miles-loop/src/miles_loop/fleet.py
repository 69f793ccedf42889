"""The engines of a run: started together, updated together, brought back when one dies.

Invariant: while nobody holds `weights_lock`, the trainer has exactly the version that the fleet serves. Whoever
changes weights (a training step with its update) or copies them (to an engine that came back) holds the lock, so an
engine that was away is given the current weights before the router lets it serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_contracts import DeadlineExceededError, PauseMode, WeightUpdateError
from miles_loop.audit import EngineRecords
from miles_loop.errors import RunError
from miles_loop.gateway import Gateway
from miles_loop.late import ATTACHED_LATE_S, PROCESS_LATE_S, said_when_late
from miles_loop.lockstep import Lockstep
from miles_loop.processes import Process
from miles_loop.routing import LocalRouting, Routing
from miles_loop.serving import until_healthy
from miles_loop.sglang_weights import buckets_in_flight, with_checks
from miles_loop.transports import FleetTransport, LocalTransport, NotConnectedError
from miles_rollout.engine_client import EngineClient
from miles_rollout.router import Router, RouterConfig
from miles_sync import Expect, FleetFencedError, LogprobCanary, Phase, UpdateReport, UpdateSource, update_weights

_UPDATE_TRIES = 3
_PROBE = (5, 6, 7, 8, 9, 10, 11)
"""Tokens that the canary continues: every vocabulary has them."""


@dataclass(slots=True)
class EngineSlot:
    """One engine: its client and, when the run started it, its process."""

    client: EngineClient
    process: Process | None
    restarts_left: int
    up: bool = False

    @property
    def url(self) -> str:
        """Address of the engine."""
        return self.client.url


class Fleet:
    """All engines of a run.

    Args:
        engines: clients in order, each with its process or None for an engine that somebody else runs.
        source: where weights come from.
        transport: how they reach engines; the shared memory of this machine when not given.
        canary: what a probe of the policy around an update has to show; None sends no probe.
        records: what engines answer is recorded here.
        mode: what happens to running requests during an update.
        update_deadline_s: of one update.
        start_timeout_s: of an engine's start.
        restarts: how often each engine is started again.
        on_event: told, in words, what happened to engines.
        router: deadlines and limits of both routers.
        gateway: SGLang's router, through which turns go; None for Miles' own.
        hang_s: an engine that answers no health check for this long is out of service; its process is killed.
        lockstep: send requests in rounds, so that the run can be repeated bit for bit (see `miles_loop.lockstep`).
        routing: routers elsewhere; None makes them here, of the five arguments that they need.
    """

    def __init__(
        self,
        engines: Sequence[tuple[EngineClient, Process | None]],
        *,
        source: UpdateSource,
        transport: FleetTransport | None = None,
        canary: Expect | None = None,
        records: EngineRecords,
        mode: PauseMode,
        update_deadline_s: float,
        start_timeout_s: float,
        restarts: int,
        on_event: Callable[[str], None],
        router: RouterConfig | None = None,
        gateway: Gateway | None = None,
        hang_s: float = 120.0,
        lockstep: bool = False,
        routing: Routing | None = None,
    ) -> None:
        self._slots = [EngineSlot(client, process, restarts) for client, process in engines]
        self._source = source
        self._transport = transport or LocalTransport()
        self._canary = canary
        self._updated = False
        self._unverified: dict[str, str] = {}
        self._mode = mode
        self._update_deadline_s = update_deadline_s
        self._start_timeout_s = start_timeout_s
        self._on_event = on_event
        self._hang_s = hang_s
        self._router_config = router or RouterConfig()
        self._watchers: list[asyncio.Task[None]] = []
        self.version = 0
        self.restarts = 0
        self.weights_lock = asyncio.Lock()
        self.failed: asyncio.Future[RunError] = asyncio.get_running_loop().create_future()
        self._gateway = gateway
        self._local: LocalRouting | None = None
        if routing is None:
            clients = [slot.client for slot in self._slots]
            self._local = LocalRouting(clients, records, self._router_config, gateway=gateway, lockstep=lockstep)
        self.routing: Routing = routing or self._require_local()

    def _require_local(self) -> LocalRouting:
        assert self._local is not None, "the routers of this run are in its rollout workers"
        return self._local

    @property
    def router(self) -> Router:
        """Routes training, in this process: every answer is recorded."""
        return self._require_local().router

    @property
    def evaluation_router(self) -> Router:
        """Routes evaluation, in this process: nothing is recorded."""
        return self._require_local().evaluation_router

    @property
    def lockstep(self) -> Lockstep | None:
        """Rounds of training in this process; whoever knows how many trajectories are in flight tells them."""
        return None if self._local is None else self._local.lockstep

    def fail(self, reason: RunError) -> None:
        """The run cannot go on."""
        if not self.failed.done():
            self.failed.set_result(reason)

    async def wait_ready(self) -> None:
        """Wait until every engine answers, then watch their processes.

        Raises:
            ProcessDiedError: one ended before it answered.
            DeadlineExceededError: one did not answer in time.
        """
        await asyncio.gather(*(self._wait_ready(slot) for slot in self._slots))
        if self._gateway is not None:
            await self._gateway.wait_ready()
            self._watchers.append(asyncio.create_task(self._watch_gateway(self._gateway), name="watch-router"))
        for slot in self._slots:
            if slot.client.address != slot.url:  # it had to move before it served: routers elsewhere are to know
                await self.routing.readmit(slot.url, slot.client.address)
        await self.routing.start()
        for slot in self._slots:
            slot.up = True
            self._watchers.append(asyncio.create_task(self._watch_answers(slot), name=f"watch-answers-{slot.url}"))
            if slot.process is not None:
                self._watchers.append(asyncio.create_task(self._watch(slot), name=f"watch-{slot.process.name}"))

    async def _wait_ready(self, slot: EngineSlot) -> None:
        if slot.process is None:
            text, after_s = f"the engine at {slot.url} does not answer yet; is it running?", ATTACHED_LATE_S
        else:
            text, after_s = f"process {slot.process.name} is not ready yet; see {slot.process.log}", PROCESS_LATE_S
        text += f"; waiting up to {self._start_timeout_s:g} s (engine.start_timeout_s)"
        try:
            async with said_when_late(self._on_event, text, after_s), asyncio.timeout(self._start_timeout_s):
                await until_healthy(slot.client, slot.process, self._on_event)
        except TimeoutError:
            where = f"see {slot.process.log}" if slot.process is not None else "is it running?"
            raise DeadlineExceededError(
                f"the engine at {slot.url}", self._start_timeout_s, f"{where}, or raise engine.start_timeout_s"
            ) from None

    async def update(self, version: int) -> UpdateReport | None:
        """Bring every engine that is up to `version`; the caller holds `weights_lock`.

        An engine that an update has left paused, with weights that must not serve, is sent everything again while it
        answers; only then is it given up.

        Returns None when no engine is up: those that come back will be given this version.

        Raises:
            RunError: the update failed for a reason that trying again does not cure.
        """
        report: UpdateReport | None = None
        done: set[str] = set()
        fenced: list[EngineSlot] = []
        for attempt in range(_UPDATE_TRIES):
            targets = [slot for slot in self._slots if slot.up and slot.url not in done]
            if not targets:
                break
            try:
                report = await self._transfer(targets, version, again=attempt > 0)
                break
            except NotConnectedError as error:
                await self._expel([error.engine], error)
            except FleetFencedError as error:
                if error.committed:
                    report = error.report
                    done.update(report.serving)
                fenced += await self._fence(error, again=attempt < _UPDATE_TRIES - 1)
            except WeightUpdateError as error:
                if attempt == _UPDATE_TRIES - 1 and done:
                    await self._expel([slot.url for slot in targets], error)  # the others have the new version
                elif attempt == _UPDATE_TRIES - 1:
                    raise RunError("weight_update_failed", str(error)) from error
                else:
                    self._on_event(f"{error}; trying again")
            if all(slot.process is None for slot in self._slots) and not any(slot.up for slot in self._slots):
                raise RunError("engines_gone", "no engine could be updated, and none of them was started by this run")
        self.version, self._updated = version, True
        self.routing.set_version(version)
        for slot in fenced:
            if slot.up:
                await self._readmit(slot)
        return report

    async def _fence(self, error: FleetFencedError, *, again: bool) -> list[EngineSlot]:
        """Take fenced engines out of the routers; those that answer and are to be updated again stay up.

        What a canary has condemned is not sent again: only a restart makes such an engine trustworthy.
        """
        again = again and all(fault.phase is not Phase.CANARY for fault in error.report.faults)
        fenced = [slot for slot in self._slots if slot.url in error.report.fenced]
        alive = [slot for slot in fenced if again and await slot.client.healthy()]
        for slot in alive:
            self._quarantine(slot, f"fenced: {error}")
            self._on_event(f"engine {slot.url} is updated again: {error}")
        await self._expel([slot.url for slot in fenced if slot not in alive], error)
        return alive

    async def _transfer(self, targets: Sequence[EngineSlot], version: int, *, again: bool = False) -> UpdateReport:
        try:
            engines = await self._transport.connect([slot.client for slot in targets])
            async with self.routing.updating():
                report = await update_weights(
                    engines,
                    self._source,
                    version=version,
                    mode=self._mode,
                    deadline_s=self._update_deadline_s,
                    canary=self._probe(version, again),
                    in_flight=buckets_in_flight(engines),
                )
            return self._told_of_checks(with_checks(report, engines))
        except BaseException:
            self._transport.reset()
            raise

    def _told_of_checks(self, report: UpdateReport) -> UpdateReport:
        """Say what is not verified of an engine, once for as long as it stays the same."""
        for check in report.checks:
            if check.not_compared and self._unverified.get(check.engine) != str(check):
                self._unverified[check.engine] = str(check)
                self._on_event(f"weights: {check}")
        return report

    def _probe(self, version: int, again: bool) -> LogprobCanary | None:
        """The probe of one update.

        What engines answered before counts for an update of a fleet that serves: weights that are sent again need
        not move, and an engine that an earlier update has left paused answers nothing.
        """
        if self._canary is None:
            return None
        serves = self._updated and not again and version != self.version
        return LogprobCanary([_PROBE], expect=self._canary if serves else Expect.ANYTHING)

    async def flush(self) -> None:
        """Forget every cached prefix on the engines that are up."""
        await asyncio.gather(*(slot.client.flush_cache() for slot in self._slots if slot.up))

    async def _expel(self, urls: Sequence[str | None], error: WeightUpdateError) -> None:
        """These engines are out: a process of ours is killed, and its watcher brings it back with good weights."""
        for slot in self._slots:
            if slot.url not in urls:
                continue
            # One that is down already was found dead meanwhile: what runs there now is its fresh process.
            was_up, slot.up = slot.up, False
            self._quarantine(slot, f"fenced: {error}")
            self._on_event(f"engine {slot.url} is out of service: {error}")
            if slot.process is not None and was_up:
                slot.process.crash("it could not be updated")

    async def _watch(self, slot: EngineSlot) -> None:
        """Supervise one engine's process until the run ends."""
        assert slot.process is not None
        while True:
            death = await slot.process.died()
            slot.up = False
            self._quarantine(slot, death.how)
            if slot.restarts_left == 0:
                self._give_up(slot, death)
                return
            slot.restarts_left -= 1
            self.restarts += 1
            self._on_event(f"engine {slot.process.name} {death.how}; starting it again")
            try:
                await slot.process.start()
                await self._wait_ready(slot)
                await self._revive(slot)
            except (RunError, DeadlineExceededError, WeightUpdateError) as error:
                self._on_event(f"engine {slot.process.name} could not be brought back: {error}")
                # The next round counts it as another restart.
                slot.process.crash("it could not be brought back")

    async def _watch_gateway(self, gateway: Gateway) -> None:
        """Without SGLang's router no turn gets anywhere: the run ends when it does not stay up."""
        self.fail(await gateway.watch())

    async def _watch_answers(self, slot: EngineSlot) -> None:
        """Notice an engine that runs and no longer answers; an engine of somebody else also when it is back."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            await asyncio.sleep(self._router_config.health_interval_s)
            if slot.process is None and not slot.up:
                await self._try_revive(slot)
            if not slot.up or await slot.client.healthy():
                answered = loop.time()
            elif loop.time() - answered >= self._hang_s and slot.up:
                slot.up = False
                self._quarantine(slot, f"no answer for {self._hang_s:g} s")
                self._on_event(f"engine {slot.url} has not answered for {self._hang_s:g} s")
                if slot.process is not None:
                    # Its own watcher brings it back.
                    slot.process.crash(f"it hung, without an answer for {self._hang_s:g} s")

    async def _try_revive(self, slot: EngineSlot) -> None:
        """Take back an engine that somebody else runs, once it answers again."""
        if not await slot.client.healthy():
            return
        try:
            await self._revive(slot)
        except WeightUpdateError as error:
            self._on_event(f"engine {slot.url} could not be brought back: {error}")

    async def _revive(self, slot: EngineSlot) -> None:
        """Give a fresh engine the fleet's weights, then let it serve."""
        async with self.weights_lock:
            self._transport.reset()
            await self._transfer([slot], self.version)
            slot.up = True
            await self._readmit(slot)
        self._on_event(f"engine {slot.url} serves again, version {self.version}")

    async def _readmit(self, slot: EngineSlot) -> None:
        """Let the routers use an engine that has the fleet's weights."""
        await self.routing.readmit(slot.url, slot.client.address)

    def _quarantine(self, slot: EngineSlot, reason: str) -> None:
        self.routing.quarantine(slot.url, reason)

    def _give_up(self, slot: EngineSlot, death: RunError) -> None:
        """An engine has used up its restarts: the run goes on while another one serves."""
        if any(other.up for other in self._slots):
            self._on_event(f"engine {slot.url} is given up: {death}")
        else:
            self.fail(death)

    async def close(self, stop_timeout_s: float) -> None:
        """End watchers, connections and processes."""
        for watcher in self._watchers:
            watcher.cancel()
        for watcher in self._watchers:
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        await self.routing.close()
        if self._gateway is not None:
            await self._gateway.close(stop_timeout_s)
        await asyncio.gather(*(slot.client.close() for slot in self._slots))
        await asyncio.gather(*(s.process.stop(stop_timeout_s) for s in self._slots if s.process is not None))
