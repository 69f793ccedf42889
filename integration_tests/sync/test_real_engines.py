"""Weight updates of real engine processes over HTTP: local transport and disk-delta, with canary and kill -9."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from real_engines import PROMPT, assert_serves, make_model, probe, weights_of
from transformers import Qwen3ForCausalLM
from weight_trainer import manifest_of

from miles_contracts import (
    EngineUnavailableError,
    PauseMode,
    WeightManifest,
    WeightUpdateError,
)
from miles_loop.ports import Port
from miles_rollout.engine_client import EngineClient
from miles_sync import (
    Expect,
    FleetFencedError,
    LocalSender,
    LogprobCanary,
    UpdateReport,
    update_weights,
)
from miles_sync.disk import DeltaPublisher, DeltaSubscriber, DiskEngine, DiskSender, FolderStore


class Source:
    """A trainer in this process, with either sender."""

    def __init__(self, sender: LocalSender | DiskSender, model: Qwen3ForCausalLM) -> None:
        self.sender, self.model = sender, model
        self.count = 0

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self.count += 1
        self.weights = weights_of(self.model)
        self.manifest = manifest_of(self.weights, version)
        return f"update-{version}-{self.count}-{id(self):x}", self.manifest

    async def buckets(self, update_id: str) -> AsyncIterator[object]:
        for bucket in self.sender.send(self.weights.items(), self.manifest, update_id):
            yield bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        self.sender.acknowledge(update_id, index)

    async def release(self, update_id: str) -> None:
        self.sender.release(update_id)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two engine processes that serve the model of seed 0 as version 0, by url."""
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    started: dict[str, subprocess.Popen[bytes]] = {}
    ports = [Port("127.0.0.1") for _ in range(2)]
    for port in ports:
        command = [sys.executable, "-m", "miles_rollout.engine", "--model-path", str(folder), "--weight-version", "0"]
        started[port.url] = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port.number)])
    yield started
    for process in started.values():
        process.kill()
        process.wait()
    for port in ports:
        port.close()


@pytest.fixture
async def engines(processes: dict[str, subprocess.Popen[bytes]]) -> AsyncIterator[list[EngineClient]]:
    clients = [EngineClient(url) for url in processes]
    async with asyncio.timeout(120):
        for client in clients:
            while not await client.healthy():  # noqa: ASYNC110 - another process, there is no event
                await asyncio.sleep(0.2)
    yield clients
    for client in clients:
        await client.close()


async def update(engines: list, source: Source, version: int, expect: Expect = Expect.CHANGE) -> UpdateReport:
    canary = LogprobCanary([PROMPT, [1, 2, 3]], expect=expect)
    return await update_weights(
        engines, source, version=version, mode=PauseMode.RETRACT, deadline_s=60, settle_s=10, canary=canary
    )


async def test_engines_serve_the_trainers_weights_after_every_update(
    engines: list[EngineClient], tmp_path: Path
) -> None:
    with LocalSender(bucket_bytes=4096, receivers_copy=True) as sender:
        for version in (1, 2):
            model = make_model(version)
            report = await update(engines, Source(sender, model), version)
            assert report.num_buckets > 5
            assert not report.faults
            for engine in engines:
                await assert_serves(engine, model, version)


async def test_disk_deltas_reach_engines_and_a_wrong_canary_goes_back_to_the_checkpoint_before(
    engines: list[EngineClient], tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    store, companion = FolderStore(tmp_path / "shared"), tmp_path / "config.json"
    base = make_model(3)
    base.config.to_json_file(companion)
    host = DeltaSubscriber(store, tmp_path / "host", companions=[companion])
    fleet = [DiskEngine(engine, host) for engine in engines]
    source = Source(DiskSender(DeltaPublisher(store)), base)
    await update(fleet, source, 3)
    next_model = make_model(3)
    with torch.no_grad():
        next_model.model.layers[0].mlp.up_proj.weight += 0.05
    source.model = next_model
    await update(fleet, source, 4)
    for engine in engines:
        await assert_serves(engine, next_model, 4)
    source.model = make_model(5)
    # The probes change although they were said not to: every engine has to load the version before again.
    with pytest.raises(WeightUpdateError, match="should not have") as caught:
        await update(fleet, source, 5, Expect.SAME)
    assert not isinstance(caught.value, FleetFencedError)
    for engine in engines:
        await assert_serves(engine, next_model, 4)


async def test_an_engine_killed_in_the_middle_of_an_update_leaves_the_other_at_the_old_version(
    engines: list[EngineClient], processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    before = await probe(engines[0])
    version = await engines[0].weight_version()
    victim = processes[engines[1].url]

    class Killing(Source):
        async def buckets(self, update_id: str) -> AsyncIterator[object]:
            async for bucket in super().buckets(update_id):
                if getattr(bucket, "index", 0) == 3:
                    victim.kill()
                    victim.wait()
                yield bucket

    with LocalSender(bucket_bytes=4096, receivers_copy=True) as sender:
        with pytest.raises(FleetFencedError) as caught:
            await update(engines, Killing(sender, make_model(9)), 9)
        assert caught.value.report.fenced == (engines[1].url,)
        assert await engines[0].weight_version() == version
        assert await probe(engines[0]) == before
        await update(engines[:1], Source(sender, make_model(9)), 9)
        await assert_serves(engines[0], make_model(9), 9)
    with pytest.raises(EngineUnavailableError):
        await engines[1].weight_version()
