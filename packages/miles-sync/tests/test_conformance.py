"""One suite for all transports, each between real processes: trainer ranks, engines, and this one as the driver."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sync_layouts as layouts
import torch
from sync_processes import Child, ProcessEngine, ProcessSource, TrainerSide

from miles_contracts import PauseMode, WeightUpdateError
from miles_sync import FleetFencedError, LocalReceiver, LocalSender, UpdateReport, update_weights
from miles_sync.broadcast import BroadcastReceiver, BroadcastSender
from miles_sync.convert import scatter
from miles_sync.disk import DeltaPublisher, DeltaSubscriber, DiskReceiver, DiskSender, FolderStore
from miles_sync.gathering import gather_tensors, plan_gather, send_shards
from miles_sync.group import Group, Meeting
from miles_sync.layout import Layout, whole
from miles_sync.peer import PeerBackend, PeerReceiver, PeerSender, merge
from miles_sync.peer.shared import SharedBackend
from miles_sync.peer.tcp import TcpBackend
from miles_sync.transfer import plan_transfers

BUCKET = 700
TIMEOUT_S = 100.0
"""For what takes a fraction of a second on a machine that does nothing else; the dead are noticed at once."""
VICTIM = "model.layers.0.mlp.experts.2.up_proj.weight"


class Fleet:
    """A transport between two engines and its trainer ranks; `expected(rank)` is what an engine then serves."""

    name = ""
    engines_hold: Layout = whole(layouts.specs(), 2)

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.engines = [ProcessEngine(f"engine-{r}", self._receiver_maker(r)) for r in range(2)]
        self._spare = itertools.count(2)
        self.source = self.start_trainer()

    def _receiver_maker(self, rank: int) -> Callable[[], Any]:
        return lambda: self.receiver(rank, f"engine-{rank}")

    def receiver(self, rank: int, name: str) -> Any:
        raise NotImplementedError

    def sender(self, rank: int) -> Any:
        raise NotImplementedError

    def stored(self, rank: int) -> Callable[..., Any]:
        return lambda weights: weights.items()

    def trainer_ranks(self) -> int:
        return 1

    def start_trainer(self) -> ProcessSource:
        children = []
        for rank in range(self.trainer_ranks()):
            make = lambda r=rank: TrainerSide(self.sender(r), layouts.weights, self.stored(r))  # noqa: E731
            children.append(Child(f"trainer-{rank}", make))
        source = ProcessSource(children, self.merge if self.trainer_ranks() > 1 else None)
        self.connect(source)
        return source

    def merge(self, buckets: Sequence[Any]) -> Any:
        raise NotImplementedError

    def connect(self, source: ProcessSource) -> None:
        """Tell the trainer who the engines are."""

    def restart_trainer(self) -> None:
        for child in self.source.ranks:
            child.stop()
        self.source = self.start_trainer()

    def restart_engine(self, rank: int) -> None:
        self.engines[rank].child.stop()
        self.engines[rank] = ProcessEngine(f"engine-{rank}", self._receiver_maker(rank))
        self.connect(self.source)

    def expected(self, rank: int, seed: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        held = scatter(self.engines_hold, rank, layouts.weights(seed))
        return {
            n: (str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for n, t in held.items()
        }

    async def update(self, version: int, *, seed: int, die_at: int = -1, corrupt: str = "") -> UpdateReport:
        for number, child in enumerate(self.source.ranks):
            # Only one trainer rank dies: the harder case for the others.
            await child.ask("configure", seed, die_at if number == 0 else -1, corrupt)
        return await update_weights(
            self.engines, self.source, version=version, mode=PauseMode.RETRACT, deadline_s=TIMEOUT_S, settle_s=TIMEOUT_S
        )

    def assert_serves(self, rank: int, version: int | None, seed: int) -> None:
        got_version, paused, tensors = self.engines[rank].child.call("state")
        assert (got_version, paused) == (version, False)
        assert tensors == ({} if version is None else self.expected(rank, seed))

    def close(self) -> None:
        for child in [*self.source.ranks, *(e.child for e in self.engines)]:
            child.stop()


class LocalFleet(Fleet):
    name = "local"

    def receiver(self, rank: int, name: str) -> Any:
        return LocalReceiver()

    def sender(self, rank: int) -> Any:
        return LocalSender(self.tmp_path, BUCKET, receivers_copy=True)


class DiskFleet(Fleet):
    name = "disk"

    def receiver(self, rank: int, name: str) -> Any:
        return DiskReceiver(DeltaSubscriber(self.store(), self.tmp_path / name, shard_bytes=2000))

    def sender(self, rank: int) -> Any:
        return DiskSender(DeltaPublisher(self.store(), chunk_bytes=512, part_bytes=2000))

    def store(self) -> FolderStore:
        (self.tmp_path / "shared").mkdir(exist_ok=True)
        return FolderStore(self.tmp_path / "shared")


class BroadcastFleet(Fleet):
    name = "broadcast"

    def receiver(self, rank: int, name: str) -> Any:
        return BroadcastReceiver(name, timeout_s=TIMEOUT_S)

    def sender(self, rank: int) -> Any:
        meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=TIMEOUT_S)
        return BroadcastSender(meeting, ["engine-0", "engine-1"], BUCKET, in_place_bytes=100)

    def connect(self, source: ProcessSource) -> None:
        source.ranks[0].call("set_receivers", [engine.url for engine in self.engines])


class PackedBroadcastFleet(BroadcastFleet):
    """Buckets as SGLang takes them."""

    name = "broadcast, packed"

    def sender(self, rank: int) -> Any:
        sender = super().sender(rank)
        sender.split = False
        return sender


class PeerFleet(Fleet):
    """Three FSDP trainer ranks to two tensor- and expert-parallel engine ranks."""

    name = "peer"
    trainer_holds = layouts.fsdp(3)
    engines_hold = layouts.engine(2)

    def backend(self) -> PeerBackend:
        return TcpBackend(timeout_s=TIMEOUT_S)

    def receiver(self, rank: int, name: str) -> Any:
        return PeerReceiver(self.trainer_holds, self.engines_hold, rank, self.backend())

    def sender(self, rank: int) -> Any:
        return PeerSender(self.trainer_holds, self.engines_hold, rank, self.backend().writer(), ["", ""], BUCKET)

    def stored(self, rank: int) -> Callable[..., Any]:
        return lambda weights: scatter(self.trainer_holds, rank, weights)

    def trainer_ranks(self) -> int:
        return len(self.trainer_holds.ranks)

    def merge(self, buckets: Sequence[Any]) -> Any:
        return merge(plan_transfers(self.trainer_holds, self.engines_hold), buckets)

    def connect(self, source: ProcessSource) -> None:
        for rank, engine in enumerate(self.engines):
            handle = engine.child.call("handle")
            for child in source.ranks:
                child.call("set_handle", rank, handle)


class SharedPeerFleet(PeerFleet):
    name = "peer, shared memory"

    def backend(self) -> PeerBackend:
        return SharedBackend(self.tmp_path)


class TensorParallelPeerFleet(PeerFleet):
    """Four tensor-parallel trainer ranks that cut every expert, to two engine ranks that hold whole experts."""

    name = "peer, tensor parallel"
    trainer_holds = layouts.engine(4, expert_parallel=False)


class MegatronPeerFleet(PeerFleet):
    """Four expert-parallel trainer ranks with interleaved qkv, to two that cut experts and store the head twice."""

    name = "peer, megatron"
    trainer_holds = layouts.engine(4, interleaved=True)
    engines_hold = layouts.engine(2, expert_parallel=False, tied_head=True)


class ReplicatedPeerFleet(PeerFleet):
    """Two trainer ranks that hold the whole model each, as data-parallel ones do."""

    name = "peer, replicas"
    trainer_holds = whole(layouts.specs(), 2)


class NixlPeerFleet(PeerFleet):
    name = "peer, nixl"

    def backend(self) -> PeerBackend:
        from miles_sync.peer.nixl import NixlBackend

        return NixlBackend(timeout_s=TIMEOUT_S)


SHARDED = [PeerFleet, SharedPeerFleet, TensorParallelPeerFleet, MegatronPeerFleet, NixlPeerFleet]
PEERS = [*SHARDED, ReplicatedPeerFleet]
FLEETS = [LocalFleet, DiskFleet, BroadcastFleet, PackedBroadcastFleet, *PEERS]


@pytest.fixture(params=FLEETS, ids=[f.name for f in FLEETS])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    if request.param is NixlPeerFleet:
        pytest.importorskip("nixl")
    fleet: Fleet = request.param(tmp_path)
    yield fleet
    fleet.close()


async def test_every_engine_serves_every_bit_of_version_after_version(fleet: Fleet) -> None:
    for version in (1, 2, 3):
        report = await fleet.update(version, seed=version)
        assert not report.faults
        for rank in range(2):
            fleet.assert_serves(rank, version, version)


@pytest.mark.parametrize("step", ["begin", "load", "commit"])
async def test_a_refusal_leaves_the_old_version_and_the_next_update_goes_through(fleet: Fleet, step: str) -> None:
    await fleet.update(1, seed=1)
    what = "load 0" if step == "load" else step
    for engine in fleet.engines if step == "commit" else fleet.engines[1:]:
        engine.child.call("arm", "", what)
    with pytest.raises(WeightUpdateError, match=f"refused to {what}") as caught:
        await fleet.update(2, seed=2)
    assert not isinstance(caught.value, FleetFencedError)
    for rank in range(2):
        fleet.assert_serves(rank, 1, 1)
        fleet.engines[rank].child.call("arm", "", "")
    await fleet.update(3, seed=3)
    for rank in range(2):
        fleet.assert_serves(rank, 3, 3)


@pytest.mark.parametrize("step", ["begin", "load 0", "commit"])
async def test_an_engine_killed_at_any_step_never_leaves_a_mixed_fleet(fleet: Fleet, step: str) -> None:
    await fleet.update(1, seed=1)
    fleet.engines[1].child.call("arm", step, "")
    with pytest.raises(FleetFencedError) as caught:
        await fleet.update(2, seed=2)
    assert caught.value.report.fenced == ("engine-1",)
    assert caught.value.committed is (step == "commit")
    outcome = 2 if step == "commit" else 1
    fleet.assert_serves(0, outcome, outcome)
    fleet.restart_engine(1)
    await fleet.update(3, seed=3)
    for rank in range(2):
        fleet.assert_serves(rank, 3, 3)


@pytest.mark.parametrize("bucket", [0, 1])
async def test_a_trainer_killed_in_the_middle_leaves_the_old_version_everywhere(fleet: Fleet, bucket: int) -> None:
    if bucket and fleet.name == "disk":
        pytest.skip("a publication is one bucket; killing inside it is tested with the publisher")
    await fleet.update(1, seed=1)
    with pytest.raises(WeightUpdateError):
        await fleet.update(2, seed=2, die_at=bucket)
    for rank in range(2):
        fleet.assert_serves(rank, 1, 1)
    fleet.restart_trainer()
    await fleet.update(2, seed=5)
    for rank in range(2):
        fleet.assert_serves(rank, 2, 5)


async def test_wrong_bits_are_named_and_nothing_is_committed(fleet: Fleet) -> None:
    if not isinstance(fleet, LocalFleet | BroadcastFleet):
        pytest.skip("see the transport's own tests")
    await fleet.update(1, seed=1)
    with pytest.raises(WeightUpdateError, match="digest is") as caught:
        await fleet.update(2, seed=2, corrupt=VICTIM)
    assert caught.value.tensor == VICTIM
    for rank in range(2):
        fleet.assert_serves(rank, 1, 1)
    await fleet.update(2, seed=2)
    for rank in range(2):
        fleet.assert_serves(rank, 2, 2)


async def test_a_fleet_that_shrinks_opens_a_new_group(tmp_path: Path) -> None:
    fleet = BroadcastFleet(tmp_path)
    try:
        await fleet.update(1, seed=1)
        gone = fleet.engines.pop()
        gone.child.stop()
        await fleet.source.ranks[0].ask("set_receivers", ["engine-0"])
        await fleet.update(2, seed=2)
        fleet.assert_serves(0, 2, 2)
    finally:
        fleet.close()


class ShardedBroadcastFleet(BroadcastFleet):
    """Three trainer ranks that hold shards; rank 0 gathers while it broadcasts."""

    layout = layouts.engine(4, expert_parallel=False)

    def __init__(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        super().__init__(tmp_path)

    def start_trainer(self) -> ProcessSource:
        ranks = [Child(f"trainer-{r}", lambda r=r: self.rank(r)) for r in range(4)]
        return ShardedSource(ranks)

    def rank(self, rank: int) -> Any:
        group = Meeting("127.0.0.1", self.port, owner=rank == 0, timeout_s=TIMEOUT_S).open("trainer", rank, 4)
        return ShardedTrainer(group, rank, self.layout, self.sender(0) if rank == 0 else None)


class ShardedTrainer(TrainerSide):
    """Rank 0 broadcasts what it gathers; the others send their shards when an update begins."""

    def __init__(self, group: Group, rank: int, layout: Layout, sender: Any) -> None:
        self.group, self.rank, self.layout = group, rank, layout
        self.plan = plan_gather(layout, BUCKET, experts_apart=False)
        super().__init__(sender, layouts.weights, self._gathered)

    def _gathered(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_tensors(self.group, self.layout, scatter(self.layout, self.rank, weights), self.plan)

    def serve(self) -> None:
        send_shards(
            self.group, self.layout, self.rank, scatter(self.layout, self.rank, self.weights(self.seed)), self.plan
        )


class ShardedSource(ProcessSource):
    """Only rank 0 is asked for buckets; the other ranks serve it."""

    def __init__(self, ranks: list[Child]) -> None:
        super().__init__(ranks[:1])
        self.others = ranks[1:]

    async def begin(self, version: int) -> Any:
        import asyncio

        begun = await super().begin(version)
        self.serving = [asyncio.create_task(rank.ask("serve")) for rank in self.others]
        return begun

    async def release(self, update_id: str) -> None:
        await super().release(update_id)
        for task in self.serving:
            await task


async def test_shards_of_four_trainer_ranks_are_gathered_and_broadcast(tmp_path: Path) -> None:
    fleet = ShardedBroadcastFleet(tmp_path)
    try:
        for version in (1, 2):
            for child in fleet.source.others:  # type: ignore[attr-defined]
                await child.ask("configure", version, -1, "")
            report = await fleet.update(version, seed=version)
            assert not report.faults
            for rank in range(2):
                fleet.assert_serves(rank, version, version)
    finally:
        for child in fleet.source.others:  # type: ignore[attr-defined]
            child.stop()
        fleet.close()
