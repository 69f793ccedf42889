from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest
from sync_fleet import Hook, MemoryEngine, MemorySource, random_weights, refuse, same_bits

from miles_contracts import (
    Engine,
    EngineUnavailableError,
    InvalidFieldError,
    PauseMode,
    ShmBucket,
    WeightManifest,
    WeightUpdateError,
)
from miles_sync import FleetFencedError, LocalSender, UpdateReport, update_weights

STEPS = ["version", "pause", "begin", "load 0", "load 1", "load 2", "load 3", "commit", "version", "resume"]


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[LocalSender]:
    with LocalSender(tmp_path, 5000) as sender:
        yield sender


def fleet(count: int = 3, hook: Hook | None = None) -> list[MemoryEngine]:
    return [MemoryEngine(f"engine-{i}", hook=hook if i == 1 else None) for i in range(count)]


async def update(engines: list[MemoryEngine], source: MemorySource, version: int = 1, **options: float) -> UpdateReport:
    options = {"deadline_s": 20.0, "settle_s": 5.0, **options}
    return await update_weights(engines, source, version=version, mode=PauseMode.RETRACT, **options)  # type: ignore[arg-type]


def on(step: str, action: Hook, *, nth: int = 1) -> Hook:
    """A hook that acts at the nth call of a step."""
    count = 0

    def hook(what: str) -> Awaitable[None] | None:
        nonlocal count
        count += what == step
        return action(what) if what == step and count == nth else None

    return hook


async def test_every_engine_gets_all_bits_and_the_report_adds_up(sender: LocalSender) -> None:
    engines, source = fleet(), MemorySource(sender, random_weights(1))
    report = await update(engines, source)
    for engine in engines:
        assert engine.calls == STEPS
        assert same_bits(engine.receiver.tensors, source.weights)
        assert engine.receiver.version == 1
        assert not engine.paused
    assert report.serving == ("engine-0", "engine-1", "engine-2")
    assert report.previous == dict.fromkeys(report.serving, 0)
    assert (report.num_tensors, report.num_buckets, report.fenced, report.faults) == (9, 4, (), ())
    assert report.num_bytes == sum(t.nbytes for t in source.weights.values())
    parts = report.pause_s + report.begin_s + report.transfer_s + report.commit_s + report.verify_s + report.resume_s
    assert 0 < parts <= report.total_s
    assert 0 < report.paused_s <= report.total_s
    assert report.metrics()["perf/update_weights_bytes"] == report.num_bytes
    assert source.released == [report.update_id]
    assert source.acknowledged == [0, 1, 2, 3]


async def test_at_most_two_buckets_are_alive_and_the_next_is_written_while_one_loads(sender: LocalSender) -> None:
    source = MemorySource(sender, random_weights(1))
    seen: list[int] = []

    async def slow(what: str) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append(len(source.sent))

    engine = MemoryEngine("e", hook=lambda what: slow(what) if what.startswith("load") else None)
    await update([engine], source)
    assert source.most_live == 2
    assert seen == [2, 3, 4, 4]


async def test_two_buckets_may_be_on_their_way_and_no_third_is_asked_for(sender: LocalSender) -> None:
    source, second = MemorySource(sender, random_weights(1)), asyncio.Event()
    sent_before: list[int] = []

    async def first_waits_for_second(what: str) -> None:
        if what == "load 1":
            sent_before.append(len(source.sent))
            second.set()
        if what == "load 0":
            await second.wait()

    engine = MemoryEngine("e", hook=first_waits_for_second)
    await update([engine], source, in_flight=2)
    assert sent_before == [2]
    assert source.most_live == 2
    assert source.acknowledged == [0, 1, 2, 3]
    assert same_bits(engine.receiver.tensors, source.weights)


async def test_a_bucket_on_its_way_is_given_up_when_the_one_before_it_is_refused(sender: LocalSender) -> None:
    source, second, given_up = MemorySource(sender, random_weights(1)), asyncio.Event(), []

    async def hook(what: str) -> None:
        if what == "load 0":
            await second.wait()
            raise WeightUpdateError("no more memory", engine="e")
        if what == "load 1":
            second.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                given_up.append(what)
                raise

    engine = MemoryEngine("e", hook=hook)
    with pytest.raises(WeightUpdateError, match="no more memory"):
        await update([engine], source, in_flight=2)
    assert given_up == ["load 1"]
    assert engine.calls[-2:] == ["version", "resume"]
    assert (engine.receiver.version, engine.paused, source.acknowledged) == (0, False, [])


@pytest.mark.parametrize("step", ["pause", "begin", "load 0", "load 2", "commit"])
async def test_a_refusal_anywhere_rolls_back_everywhere_and_is_named(sender: LocalSender, step: str) -> None:
    deny = on(step, lambda _: refuse("no more memory")("engine-1"))
    engines, source = fleet(hook=deny), MemorySource(sender, random_weights(1))
    if step == "commit":
        for engine in engines:
            engine.hook = on(step, lambda _, e=engine: refuse("no more memory")(e.url))  # type: ignore[misc]
    with pytest.raises(WeightUpdateError, match="no more memory") as caught:
        await update(engines, source)
    assert not isinstance(caught.value, FleetFencedError)
    assert caught.value.engine == ("engine-0" if step == "commit" else "engine-1")
    for engine in engines:
        assert (engine.receiver.version, engine.receiver.tensors, engine.paused) == (0, {}, False)
    await update(fleet(), source)


async def test_a_flipped_bit_names_engine_and_tensor(sender: LocalSender) -> None:
    source = MemorySource(sender, random_weights(1))

    def flip(what: str) -> None:
        path = sender._live["update-1-1"][1].path
        data = bytearray(path.read_bytes())
        data[0] ^= 4
        path.write_bytes(data)

    engines = fleet(hook=on("load 1", flip))
    with pytest.raises(WeightUpdateError, match="digest is") as caught:
        await update(engines, source)
    assert caught.value.engine in {e.url for e in engines}
    assert caught.value.tensor == "model.embed_tokens.weight"
    assert all(e.receiver.version == 0 and not e.paused for e in engines)


@pytest.mark.parametrize("step", ["pause", "begin", "load 1", "commit", "resume"])
async def test_a_request_whose_answer_is_lost_is_sent_once_more(sender: LocalSender, step: str) -> None:
    def lose(what: str) -> None:
        raise EngineUnavailableError("engine-1", "connection reset")

    engines, source = fleet(hook=on(step, lose)), MemorySource(sender, random_weights(1))
    await update(engines, source)
    assert engines[1].calls.count(step) == 2
    assert all(same_bits(e.receiver.tensors, source.weights) and not e.paused for e in engines)


@pytest.mark.parametrize("step", ["pause", "begin", "load 1"])
async def test_an_engine_that_hangs_passes_the_deadline_by_name(sender: LocalSender, step: str) -> None:
    hang = on(step, lambda _: asyncio.sleep(3600))
    engines, source = fleet(hook=hang), MemorySource(sender, random_weights(1))
    with pytest.raises(WeightUpdateError, match=r"waited .* s for engine-1 to .*see the engine's log"):
        await update(engines, source, deadline_s=0.3)
    assert all(e.receiver.version == 0 and not e.paused for e in engines)


def dies(step: str) -> Hook:
    """From this step on the engine answers nothing."""
    dead = False

    def hook(what: str) -> None:
        nonlocal dead
        dead = dead or what == step
        if dead:
            raise EngineUnavailableError("engine-1", "connection refused")

    return hook


@pytest.mark.parametrize("step", ["pause", "begin", "load 0", "load 2"])
async def test_an_engine_that_dies_before_the_commit_takes_the_others_back(sender: LocalSender, step: str) -> None:
    engines, source = fleet(hook=dies(step)), MemorySource(sender, random_weights(1))
    with pytest.raises(FleetFencedError, match="2 engine.s. serve the previous version, fenced: engine-1") as caught:
        await update(engines, source)
    assert not caught.value.committed
    assert caught.value.report.fenced == ("engine-1",)
    assert [(e.receiver.version, e.paused) for e in (engines[0], engines[2])] == [(0, False)] * 2


async def test_an_engine_that_dies_at_the_commit_is_fenced_and_the_others_go_forward(sender: LocalSender) -> None:
    engines, source = fleet(hook=dies("commit")), MemorySource(sender, random_weights(1))
    with pytest.raises(FleetFencedError, match="2 engine.s. serve version 1, fenced: engine-1") as caught:
        await update(engines, source)
    assert caught.value.committed
    assert [(e.receiver.version, e.paused) for e in (engines[0], engines[2])] == [(1, False)] * 2
    assert engines[1].paused


async def test_a_dead_engine_at_the_start_leaves_the_fleet_untouched(sender: LocalSender) -> None:
    engines, source = fleet(hook=dies("version")), MemorySource(sender, random_weights(1))
    with pytest.raises(FleetFencedError, match="connection refused"):
        await update(engines, source)
    assert engines[0].calls == ["version"]


class BadSource(MemorySource):
    """Fails at one place: raises there, or hangs."""

    def __init__(self, sender: LocalSender, place: str, error: Exception | None) -> None:
        super().__init__(sender, random_weights(1))
        self.place, self.error = place, error

    async def _maybe(self, place: str) -> None:
        if place == self.place:
            if self.error is None:
                await asyncio.sleep(3600)
            else:
                raise self.error

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        await self._maybe("begin")
        return await super().begin(version)

    async def buckets(self, update_id: str) -> AsyncIterator[ShmBucket]:
        async for bucket in super().buckets(update_id):
            await self._maybe(f"bucket {bucket.index}")
            yield bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        await self._maybe("acknowledge")
        await super().acknowledge(update_id, index)

    async def release(self, update_id: str) -> None:
        await super().release(update_id)
        await self._maybe("release")


@pytest.mark.parametrize("place", ["begin", "bucket 0", "bucket 2"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionResetError("trainer gone"), "the sender failed: ConnectionResetError: trainer gone"),
        (WeightUpdateError("mount is full", tensor="w"), "tensor w: mount is full"),
        (None, "the deadline of 0.3 s passed while waiting for the sender"),
    ],
    ids=["dies", "says why", "hangs"],
)
async def test_a_sender_that_fails_takes_everybody_back(
    sender: LocalSender, place: str, error: Exception | None, message: str
) -> None:
    engines, source = fleet(), BadSource(sender, place, error)
    with pytest.raises(WeightUpdateError, match=message):
        await update(engines, source, deadline_s=0.3 if error is None else 20.0)
    assert all((e.receiver.version, e.receiver.tensors, e.paused) == (0, {}, False) for e in engines)


@pytest.mark.parametrize("place", ["acknowledge", "release"])
async def test_failed_housekeeping_is_reported_and_does_not_fail_the_update(sender: LocalSender, place: str) -> None:
    engines, source = fleet(), BadSource(sender, place, OSError("gone"))
    report = await update(engines, source)
    assert report.faults[0].reason == f"the sender failed to {place}: OSError: gone"
    assert all(e.receiver.version == 1 for e in engines)


async def test_a_sender_that_announces_another_version_is_refused(sender: LocalSender) -> None:
    class Wrong(MemorySource):
        async def begin(self, version: int) -> tuple[str, WeightManifest]:
            return await super().begin(version + 1)

    engines = fleet()
    with pytest.raises(WeightUpdateError, match="announced version 2, 1 was asked for"):
        await update(engines, Wrong(sender, random_weights(1)))
    assert all(e.receiver.version == 0 and not e.paused for e in engines)


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_update_settles_the_fleet_first(sender: LocalSender, step: str) -> None:
    reached = asyncio.Event()

    async def wait(what: str) -> None:
        reached.set()
        await asyncio.sleep(0.05)

    engines, source = fleet(hook=on(step, wait)), MemorySource(sender, random_weights(1))
    task = asyncio.create_task(update(engines, source))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len({e.receiver.version for e in engines}) == 1
    assert not any(e.paused for e in engines)
    assert step == "version" or len(source.released) == source._count


class PolicyCanary:
    """Says what the test tells it to say about each engine."""

    def __init__(self, wrong: str | None = None) -> None:
        self.prepared: list[str] = []
        self.checked: list[str] = []
        self.wrong = wrong

    async def prepare(self, engine: Engine) -> None:
        self.prepared.append(engine.url)

    async def check(self, engine: Engine) -> None:
        self.checked.append(engine.url)
        if engine.url == self.wrong:
            raise WeightUpdateError("the policy did not change", engine=engine.url)


async def test_a_canary_probes_every_engine_after_the_commit(sender: LocalSender) -> None:
    engines, source, canary = fleet(), MemorySource(sender, random_weights(1)), PolicyCanary()
    report = await update_weights(engines, source, version=1, mode=PauseMode.IN_PLACE, deadline_s=20.0, canary=canary)
    assert canary.prepared == canary.checked == [e.url for e in engines]
    assert report.canary_s > 0


async def test_a_canary_that_fails_stops_a_fleet_that_cannot_go_back(sender: LocalSender) -> None:
    engines, source = fleet(), MemorySource(sender, random_weights(1))
    with pytest.raises(FleetFencedError, match="the policy did not change; no engine is serving") as caught:
        await update_weights(
            engines, source, version=1, mode=PauseMode.RETRACT, deadline_s=20.0, canary=PolicyCanary("engine-1")
        )
    assert not caught.value.committed
    assert all(e.paused for e in engines)


async def test_refuses_times_that_are_not_positive(sender: LocalSender) -> None:
    with pytest.raises(InvalidFieldError, match="deadline_s: got 0"):
        await update(fleet(), MemorySource(sender, {}), deadline_s=0)
    with pytest.raises(InvalidFieldError, match="settle_s"):
        await update(fleet(), MemorySource(sender, {}), settle_s=-1)


async def test_refuses_to_have_three_buckets_on_their_way(sender: LocalSender) -> None:
    with pytest.raises(InvalidFieldError, match="in_flight: got 3; use 1 to 2"):
        await update(fleet(), MemorySource(sender, {}), in_flight=3)


def test_the_drivers_side_imports_no_torch() -> None:
    code = "import sys, miles_sync; assert miles_sync.update_weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
