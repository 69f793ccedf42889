"""Weights that both ranks of a trainer group write into engines: real services, a real model, real peer memory."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from loop_toy.model import build

from miles_contracts import (
    EngineError,
    GroupRequest,
    MilesError,
    PauseMode,
    TensorSpec,
    WeightManifest,
    WeightUpdateError,
    digest,
)
from miles_loop import trainer_link as link
from miles_loop.hosts import LocalHost
from miles_loop.processes import ProcessSpec
from miles_loop.senders import make_sender
from miles_loop.trainer_group import TrainerGroup, costs_the_trainer, rank_name
from miles_loop.trainer_link import SenderSettings
from miles_loop.trainer_process import TrainerService
from miles_loop.trainer_server import Connection, serve
from miles_loop.trainer_team import Team
from miles_sync import update_weights
from miles_sync.messages import PeerBucket, peer_group_backend
from miles_sync.peer.engine import peer_factories
from miles_trainer import Trainer
from miles_trainer.config import TrainerConfig
from miles_trainer.errors import RankFailedError, RankGoneError, RanksDivergedError
from miles_trainer.ranks import OneRank

BUCKET = 20_000


class Numbered(OneRank):
    """A rank of a group that is not trained here, so nothing has to be exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def start_message(model: Path) -> link.Start:
    settings = SenderSettings(transport="peer", peer_backend="tcp", bucket_bytes=BUCKET, timeout_s=30)
    config = TrainerConfig().model_dump(mode="json")
    return link.Start(model_path=str(model), config=config, seed=0, sender=settings)


def expected_of(trainer: Trainer) -> dict[str, bytes]:
    return {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in trainer.export_weights()}


class Engine:
    """The memory of an engine, and what it would serve: a `miles_contracts.Engine` as far as an update asks.

    `on_load` is called, once, before the round of this number is looked at.
    """

    def __init__(self, specs: Sequence[TensorSpec], index: int, count: int, senders: int) -> None:
        self.url = f"engine-{index}"
        self.version: int | None = None
        self.serves: dict[str, bytes] = {}
        self.paused = False
        self.on_load: dict[int, Callable[[], Awaitable[None]]] = {}
        request = GroupRequest(
            master_address="127.0.0.1",
            master_port=0,
            rank_offset=senders + index,
            world_size=senders + count,
            backend=peer_group_backend("tcp"),
            senders=senders,
        )
        self.group = peer_factories()[peer_group_backend("tcp")](request, specs)
        self.staged: dict[str, bytes] = {}
        self._manifest: WeightManifest | None = None

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def weight_version(self) -> int | None:
        return self.version

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        self.staged, self._manifest = {}, manifest

    async def load_bucket(self, bucket: PeerBucket) -> None:
        if bucket.index in self.on_load:
            await self.on_load.pop(bucket.index)()
        self.take(bucket)

    def take(self, bucket: PeerBucket) -> None:
        for arrival in self.group.receive({"written": msgspec.to_builtins(bucket.written)}):
            assert arrival.part_of is None  # no tensor of this model is large
            if arrival.spec.digest != digest(arrival.data):
                raise EngineError(self.url, "wrong digest", 400)
            self.staged[arrival.spec.name] = arrival.data.tobytes()

    async def commit_weight_update(self, update_id: str) -> None:
        assert self._manifest is not None
        self.commit()
        self.version = self._manifest.version

    async def rollback_weight_update(self, update_id: str) -> None:
        self.staged = {}

    def commit(self) -> None:
        self.serves, self.staged = self.staged, {}


class Pair:
    """Both ranks in this process, the second behind a socket."""

    def __init__(self, model: Path) -> None:
        start = start_message(model)
        ours, self.theirs = socket.socketpair()
        self.others: list[TrainerService] = []
        loaded = threading.Event()

        def other(request: link.Start) -> TrainerService:
            self.others.append(TrainerService(request, Numbered(1, 2)))
            loaded.set()
            return self.others[0]

        def work() -> None:
            with self.theirs, contextlib.suppress(ConnectionError):  # a test that has hung up
                serve(Connection(self.theirs), other)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        team = Team([ours], 30)
        team.tell([start])
        assert loaded.wait(60)  # transformers does not load in two threads at once
        self.first = TrainerService(start, Numbered(0, 2), team)
        self.specs = self.first.trainer.weight_manifest().tensors
        self.engines: list[Engine] = []

    def connect(self) -> None:
        """Two new engines."""
        for engine in self.engines:
            engine.group.close()
        self.engines = [Engine(self.specs, index, 2, senders=2) for index in range(2)]
        addresses = tuple(engine.group.address for engine in self.engines)
        reply = self.first.answer(link.Connect(receivers=addresses, split=False))
        assert reply == link.Connected(offer=None)

    def begin(self) -> str:
        begun = self.first.answer(link.BeginExport(version=self.first.version))
        assert isinstance(begun, link.ExportBegun)
        return begun.update_id

    def next(self, update_id: str) -> PeerBucket | None:
        ready = self.first.answer(link.NextBucket(update_id=update_id))
        assert isinstance(ready, link.BucketReady)
        assert ready.bucket is None or isinstance(ready.bucket, PeerBucket)
        return ready.bucket

    def rest(self, update_id: str) -> list[PeerBucket]:
        """Take what is still to come of an update."""
        buckets = []
        while (bucket := self.next(update_id)) is not None:
            buckets.append(bucket)
            for engine in self.engines:
                engine.take(bucket)
            self.first.answer(link.Acknowledge(update_id=update_id, index=bucket.index))
        return buckets

    def update(self) -> list[PeerBucket]:
        """A whole update; what was announced."""
        update_id = self.begin()
        buckets = self.rest(update_id)
        self.first.answer(link.ReleaseExport(update_id=update_id))
        for engine in self.engines:
            engine.commit()
        return buckets

    def expected(self) -> dict[str, bytes]:
        return expected_of(self.first.trainer)

    def parameters(self, rank: int) -> dict[str, torch.Tensor]:
        service = self.first if rank == 0 else self.others[0]
        return dict(service.trainer.backend.policy.model.named_parameters())

    def close(self) -> None:
        self.first.close()
        self._thread.join()
        for engine in self.engines:
            engine.group.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    build(folder, 0)
    return folder


@pytest.fixture
def pair(model: Path) -> Iterator[Pair]:
    made = Pair(model)
    made.connect()
    yield made
    made.close()


def test_each_rank_writes_half_of_the_bytes_and_engines_get_every_bit(pair: Pair) -> None:
    for number in range(2):
        for rank in range(2):
            for parameter in pair.parameters(rank).values():
                parameter.data.add_(number)
        buckets = pair.update()
        assert [engine.serves for engine in pair.engines] == [pair.expected()] * 2
    assert len(buckets) > 2
    assert all(not bucket.confirmed for bucket in buckets)
    plan = pair.first._sender._sender.plan  # type: ignore[union-attr]
    assert sorted(one.transfer for bucket in buckets for one in bucket.written) == list(range(len(plan.transfers)))
    sent = plan.sent(2)
    assert sum(sent) == 2 * sum(len(data) for data in pair.expected().values()), "no byte more than engines hold"
    assert abs(sent[0] - sent[1]) <= 2 * max(spec.num_bytes for spec in pair.specs)
    assert min(sent) > 0


@pytest.mark.parametrize("drifted", [0, 1])
def test_ranks_that_have_drifted_apart_are_named_with_the_tensor(pair: Pair, drifted: int) -> None:
    pair.update()
    before = [dict(engine.serves) for engine in pair.engines]
    name = "model.layers.0.mlp.up_proj.weight"
    pair.parameters(drifted)[name].data.view(-1).view(torch.int32)[-1] ^= 1
    update_id = pair.begin()
    with pytest.raises(RanksDivergedError, match=rf"trainer ranks (0 and 1|1 and 0) hold different bytes of {name}"):
        pair.rest(update_id)
    assert [engine.serves for engine in pair.engines] == before
    with pytest.raises(RanksDivergedError, match=name):
        pair.first.answer(link.ReleaseExport(update_id=update_id))


def test_an_engine_that_is_gone_costs_the_update_and_not_the_group(pair: Pair) -> None:
    update_id = pair.begin()
    assert pair.next(update_id) is not None
    pair.engines[1].group.close()
    with pytest.raises(WeightUpdateError, match="peer memory .* is gone"):
        pair.rest(update_id)
    pair.first.answer(link.ReleaseExport(update_id=update_id))
    pair.connect()
    pair.update()
    assert [engine.serves for engine in pair.engines] == [pair.expected()] * 2


def test_an_engine_that_only_another_rank_cannot_reach_is_reported_by_that_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(handle: str, writes: object) -> None:
        raise WeightUpdateError("no route", tensor="w")

    update_id = pair.begin()
    monkeypatch.setattr(pair.others[0]._sender._writer, "write", broken)  # type: ignore[union-attr]
    with pytest.raises(WeightUpdateError, match="trainer rank 1: no route") as caught:
        pair.rest(update_id)
    assert caught.value.tensor == "w"
    monkeypatch.undo()
    pair.first.answer(link.ReleaseExport(update_id=update_id))
    pair.update()
    assert [engine.serves for engine in pair.engines] == [pair.expected()] * 2


def test_a_rank_at_another_version_ends_the_group(pair: Pair) -> None:
    pair.others[0].trainer.backend.version += 1
    with pytest.raises(RankFailedError, match=r"rank 1 answered MilesError: asked to export version 0"):
        pair.begin()
    with pytest.raises(RankFailedError):
        pair.begin()


def test_a_rank_that_hangs_up_in_an_update_is_named(pair: Pair) -> None:
    update_id = pair.begin()
    assert pair.next(update_id) is not None
    pair.theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankGoneError, match="trainer rank 1 has ended"):
        pair.next(update_id)


def test_what_the_ranks_write_has_a_deadline_that_is_configured() -> None:
    settings = SenderSettings(transport="peer", peer_backend="tcp", timeout_s=7.5)
    assert make_sender(settings, 1, 2)._writer._timeout_s == 7.5  # type: ignore[attr-defined]


@pytest.mark.timeout(240)
async def test_a_rank_killed_in_the_middle_of_an_update_leaves_the_old_version_everywhere(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    host = LocalHost(tmp_path / "logs", "127.0.0.1", 0)

    def spec(rank: int, where: str) -> ProcessSpec:
        return ProcessSpec(name=rank_name(rank), module="miles_loop.trainer_process", arguments=(where,))

    made = [host.make_trainer(rank, spec) for rank in range(2)]
    group = TrainerGroup(made, 120)
    trainer = Trainer(model, TrainerConfig(), seed=0)
    engines = [Engine(trainer.weight_manifest().tensors, index, 2, senders=2) for index in range(2)]
    await group.start()
    try:
        await group.form("127.0.0.1", 60, 120)
        await group.client.start(start_message(model), 120)
        await group.client.connect([engine.group.address for engine in engines], split=False)
        update = partial(update_weights, engines, group.client, version=0, mode=PauseMode.RETRACT, deadline_s=60)
        await update()
        served = [dict(engine.serves) for engine in engines]
        assert served == [expected_of(trainer)] * 2

        async def kill() -> None:
            made[1].process.crash("the test")

        engines[0].on_load[1] = kill
        with pytest.raises(WeightUpdateError, match="trainer rank 1 has ended"):
            await update()
        assert [engine.serves for engine in engines] == served
        assert not any(engine.paused or engine.staged for engine in engines)
        died = await group.died()
        assert died.name == "trainer-1"
        assert costs_the_trainer(died)
    finally:
        await group.stop(10)
        for engine in engines:
            engine.group.close()


@pytest.mark.parametrize("transport", ["local", "broadcast", "disk"])
def test_where_rank_0_sends_alone_the_others_have_nothing_to_send_with(
    model: Path, tmp_path: Path, transport: str
) -> None:
    start = msgspec.structs.replace(
        start_message(model), sender=SenderSettings(transport=transport, store=str(tmp_path / "store"))
    )
    other = TrainerService(start, Numbered(1, 2))
    with pytest.raises(MilesError, match="only rank 0 of a trainer group sends weights by this transport"):
        other.answer(link.BeginExport(version=0))
    assert not (tmp_path / "store").exists()
    other.close()
