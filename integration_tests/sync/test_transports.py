"""Every transport of a run, between a sender, a fleet and real engine processes over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engines import assert_serves, make_model, make_transport, weights_of
from weight_trainer import JointSenders, Trainer

from miles_contracts import EngineError, GroupRequest, InvalidFieldError, PauseMode, WeightUpdateError
from miles_loop.audit import EngineRecords
from miles_loop.fleet import Fleet
from miles_loop.ports import Port
from miles_loop.processes import ChildProcess, ProcessSpec
from miles_loop.senders import make_sender
from miles_loop.trainer_link import SenderSettings
from miles_rollout.engine_client import EngineClient
from miles_sync import FleetFencedError, update_weights

TRANSPORTS = ["local", "broadcast", "peer-tcp", "peer-shared", "joint-tcp", "disk"]
VICTIM = "model.layers.1.mlp.up_proj.weight"
HANG_S = 1200.0
"""A transport that waits for a dead engine until its own timeout would exceed what a test may take."""
_KEPT: list[Port] = []
"""Ports of the engines: nobody else is given them, as in a run."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    return folder


def make_trainer(kind: str, folder: Path) -> Trainer:
    transport, _, peers = kind.partition("-")
    settings = SenderSettings(
        transport="peer" if transport == "joint" else transport,
        bucket_bytes=4096,
        directory="/dev/shm",
        peer_backend=peers or "tcp",
        store=str(folder / "store"),
        timeout_s=HANG_S,
    )
    sender = JointSenders(settings, 2) if transport == "joint" else make_sender(settings)
    return Trainer(sender, weights_of(make_model(0)))


def engine_process(folder: Path, logs: Path, number: int) -> tuple[EngineClient, ChildProcess]:
    port = Port("127.0.0.1")
    _KEPT.append(port)
    where = ("--host", "127.0.0.1", "--port", str(port.number))
    arguments = ("--model-path", str(folder), *where, "--weight-version", "0")
    spec = ProcessSpec(name=f"engine-{number}", module="miles_loop.engine_process", arguments=arguments)
    return EngineClient(port.url), ChildProcess(spec, logs / f"engine-{number}.log")


class Scene:
    """Two engines in processes of their own, and the fleet that supervises them."""

    def __init__(self, kind: str, folder: Path, model: Path) -> None:
        self.trainer = make_trainer(kind, folder)
        self.events: list[str] = []
        self.engines = [engine_process(model, folder, number) for number in range(2)]
        self.fleet = Fleet(
            self.engines,
            source=self.trainer,
            transport=make_transport(kind, self.trainer, folder, model),
            records=EngineRecords(),
            mode=PauseMode.RETRACT,
            update_deadline_s=HANG_S,
            start_timeout_s=120,
            restarts=3,
            on_event=self.events.append,
        )

    async def start(self) -> None:
        await asyncio.gather(*(process.start() for _, process in self.engines))
        await self.fleet.wait_ready()

    async def update(self, version: int) -> None:
        self.trainer.weights = weights_of(make_model(version))
        async with self.fleet.weights_lock:
            await self.fleet.update(version)

    async def close(self) -> None:
        await self.fleet.close(5)
        self.trainer.sender.close()


@pytest.fixture(scope="module")
def processes(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Addresses of two engines that outlive the tests of this module."""
    logs = tmp_path_factory.mktemp("logs")
    with asyncio.Runner() as runner:
        made = [engine_process(model_folder, logs, number) for number in range(2)]

        async def start() -> None:
            await asyncio.gather(*(process.start() for _, process in made))
            async with asyncio.timeout(120):
                for client, _ in made:
                    while not await client.healthy():  # noqa: ASYNC110 - another process, there is no event
                        await asyncio.sleep(0.2)
                    await client.close()

        async def stop() -> None:
            await asyncio.gather(*(process.stop(5) for _, process in made))

        runner.run(start())
        yield [client.url for client, _ in made]
        runner.run(stop())


@pytest.fixture
async def clients(processes: list[str]) -> AsyncIterator[list[EngineClient]]:
    made = [EngineClient(url) for url in processes]
    yield made
    for client in made:
        await client.close()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_every_engine_serves_every_version(
    kind: str, clients: list[EngineClient], model_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(kind, tmp_path)
    transport = make_transport(kind, trainer, tmp_path, model_folder)
    for version in (1, 2):
        trainer.weights = weights_of(make_model(version))
        engines = await transport.connect(clients)
        report = await update_weights(
            engines, trainer, version=version, mode=PauseMode.RETRACT, deadline_s=60, settle_s=20
        )
        assert not report.faults
        assert report.num_buckets > 5 or kind == "disk"
        for client in clients:
            await assert_serves(client, make_model(version), version)
    trainer.sender.close()


@pytest.mark.parametrize("kind", ["local", "broadcast", "peer-tcp"])
async def test_wrong_bits_are_named_and_the_next_update_goes_through(
    kind: str, clients: list[EngineClient], model_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(kind, tmp_path)
    transport = make_transport(kind, trainer, tmp_path, model_folder)

    async def update(version: int) -> None:
        trainer.weights = weights_of(make_model(version))
        engines = await transport.connect(clients)
        await update_weights(engines, trainer, version=version, mode=PauseMode.RETRACT, deadline_s=60, settle_s=20)

    await update(3)
    trainer.corrupt = VICTIM
    with pytest.raises(WeightUpdateError, match="digest") as caught:
        await update(4)
    assert not isinstance(caught.value, FleetFencedError)
    assert VICTIM in str(caught.value) or kind.startswith("peer")  # there every tensor is wrong
    transport.reset()
    for client in clients:
        await assert_serves(client, make_model(3), 3)
    trainer.corrupt = ""
    await update(5)
    for client in clients:
        await assert_serves(client, make_model(5), 5)
    trainer.sender.close()


@pytest.mark.parametrize("kind", ["local", "broadcast", "peer-tcp"])
async def test_a_trainer_that_fails_in_the_middle_holds_nobody_up(
    kind: str, clients: list[EngineClient], model_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(kind, tmp_path)
    transport = make_transport(kind, trainer, tmp_path, model_folder)

    async def update(version: int) -> None:
        trainer.weights = weights_of(make_model(version))
        engines = await transport.connect(clients)
        await update_weights(
            engines, trainer, version=version, mode=PauseMode.RETRACT, deadline_s=HANG_S, settle_s=HANG_S
        )

    async with asyncio.timeout(HANG_S / 4):
        await update(6)
        trainer.stumble_at = 2
        with pytest.raises(WeightUpdateError, match="the trainer stumbles"):
            await update(7)
        transport.reset()
        for client in clients:
            await assert_serves(client, make_model(6), 6)
        trainer.stumble_at = None
        await update(7)
    for client in clients:
        await assert_serves(client, make_model(7), 7)
    trainer.sender.close()


async def test_what_an_engine_cannot_take_is_refused_by_name(clients: list[EngineClient]) -> None:
    engine = clients[0]
    distributed = "/update_weights_from_distributed"
    with pytest.raises(EngineError, match="update 'nobody' is not open"):
        await engine.weight_call(distributed, {"update_id": "nobody", "group_name": "none"}, "a bucket")
    request = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "pigeon"}
    with pytest.raises(EngineError, match=r"backend.*pigeon.*gloo"):
        await engine.weight_call("/init_weights_update_group", request, "joining")
    with pytest.raises(EngineError, match="did not meet"):
        await engine.weight_call(
            "/init_weights_update_group", {**request, "backend": "gloo", "timeout_s": 0.2}, "joining"
        )
    with pytest.raises(EngineError, match="not in such a group"):
        await engine.leave_weight_group("none")
    with pytest.raises(InvalidFieldError, match="rank_offset"):
        GroupRequest(master_address="127.0.0.1", master_port=1, rank_offset=2, world_size=2)


@pytest.mark.gate
@pytest.mark.parametrize("kind", [kind for kind in TRANSPORTS if kind != "peer-shared"])
async def test_an_engine_killed_in_an_update_is_brought_back_and_no_update_waits_for_it(
    kind: str, model_folder: Path, tmp_path: Path
) -> None:
    scene = Scene(kind, tmp_path, model_folder)
    try:
        await scene.start()
        await scene.update(1)
        victim, process = scene.engines[1]

        def kill(bucket: Any) -> None:
            if bucket.index == (0 if kind == "disk" else 3):
                scene.trainer.before = lambda bucket: None
                os.killpg(process.pid, signal.SIGKILL)

        scene.trainer.before = kill
        async with asyncio.timeout(HANG_S / 4):  # far below what a group with a hole would cost
            await scene.update(2)
            await assert_serves(scene.engines[0][0], make_model(2), 2)
            while "serves again, version 2" not in " ".join(scene.events):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await assert_serves(victim, make_model(2), 2)
            await scene.update(3)
        for client, _ in scene.engines:
            await assert_serves(client, make_model(3), 3)
        assert scene.fleet.restarts == 1
    finally:
        await scene.close()
