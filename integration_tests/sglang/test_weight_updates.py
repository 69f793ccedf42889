"""Real SGLang in the update transaction, beside an embedded engine, in a group or by handle; what cannot be undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from weight_trainer import Trainer

from miles_contracts import PauseMode, SamplingParams, WeightUpdateError
from miles_loop.senders import make_sender
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import BroadcastTransport, FleetTransport, LocalTransport
from miles_rollout.engine_client import EngineClient
from miles_sync import Expect, FleetFencedError, LogprobCanary, UpdateReport, update_weights

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PROMPT = [5, 6, 7, 8, 9, 10, 11]
BUCKET_BYTES = 1 << 16


def weights_in(folder: Path, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, sorted."""
    found = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    return {n: (t * scale).contiguous() for n, t in sorted(found.items())}


@pytest.fixture
async def engines(request) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    """SGLang and the embedded engine, of the dense model."""
    served = request.getfixturevalue("dense")
    async with EngineClient(served.sglang) as sglang, EngineClient(served.embedded) as embedded:
        yield sglang, embedded


WAYS = {"broadcast": BroadcastTransport, "local": LocalTransport}


@pytest.fixture(params=WAYS)
def way(request) -> str:
    """The way that weights take."""
    return str(request.param)


@pytest.fixture
def trainer(way: str) -> Iterator[Trainer]:
    sender = make_sender(SenderSettings(transport=way, bucket_bytes=BUCKET_BYTES, timeout_s=60))
    yield Trainer(sender, {})
    sender.close()


async def update(
    transport: FleetTransport, trainer: Trainer, clients: tuple[EngineClient, ...], version: int
) -> UpdateReport:
    """One update, as a fleet does it."""
    try:
        engines = await transport.connect(clients)
        return await update_weights(
            engines,
            trainer,
            version=version,
            mode=PauseMode.RETRACT,
            deadline_s=120,
            canary=LogprobCanary([PROMPT], expect=Expect.ANYTHING),
        )
    except BaseException:
        transport.reset()
        raise


async def greedy(engine: EngineClient) -> tuple[list[int], np.ndarray]:
    result = await engine.generate(PROMPT, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
    return list(result.output_ids), result.logprobs


@pytest.mark.parametrize("name", ["dense", "moe"])
async def test_both_kinds_of_engine_are_updated_together(name: str, way: str, trainer: Trainer, request) -> None:
    served = request.getfixturevalue(name)
    async with EngineClient(served.sglang) as sglang, EngineClient(served.embedded) as embedded:
        transport = WAYS[way](trainer)
        for version, folder in ((1, served.folders[1]), (2, served.folders[0])):
            trainer.weights = weights_in(folder)
            report = await update(transport, trainer, (sglang, embedded), version)
            assert report.serving == (sglang.url, embedded.url)
            assert report.num_buckets > 1
            assert [await e.weight_version() for e in (sglang, embedded)] == [version] * 2
            ids, logprobs = await greedy(sglang)
            same_ids, same_logprobs = await greedy(embedded)
            assert ids == same_ids
            np.testing.assert_allclose(logprobs, same_logprobs, atol=2e-5)
            received = await sglang.weight_checksums()
            await sglang.load_from_disk(folder, version)
            assert received == await sglang.weight_checksums()


async def test_an_overwritten_sglang_serves_again_only_after_a_whole_update(
    engines: tuple[EngineClient, EngineClient], way: str, trainer: Trainer, request
) -> None:
    sglang, embedded = engines
    folder = request.getfixturevalue("dense").folders[0]
    transport = WAYS[way](trainer)
    trainer.weights = weights_in(folder)
    await update(transport, trainer, engines, 3)
    before = await greedy(embedded)
    trainer.weights, trainer.stumble_at = weights_in(folder, 1.25), 2
    with pytest.raises(FleetFencedError, match="the trainer stumbles") as caught:
        await update(transport, trainer, engines, 4)
    assert not caught.value.committed
    assert caught.value.report.serving == (embedded.url,)
    assert caught.value.report.fenced == (sglang.url,)
    assert await embedded.weight_version() == 3
    ids, logprobs = await greedy(embedded)
    assert ids == before[0]
    np.testing.assert_allclose(logprobs, before[1], atol=2e-5)
    assert await sglang.weight_version() is None  # as the server itself says: it is between two versions
    with pytest.raises(WeightUpdateError, match="must not serve"):
        await (await transport.connect(engines))[0].resume()
    # A driver that comes later knows as much from the engine itself, and finds the way out.
    trainer.stumble_at = None
    fresh = WAYS[way](trainer)
    await update(fresh, trainer, engines, 4)
    assert [await e.weight_version() for e in engines] == [4, 4]
    ids, logprobs = await greedy(sglang)
    assert ids == (await greedy(embedded))[0]
    np.testing.assert_allclose(logprobs, (await greedy(embedded))[1], atol=2e-5)


async def test_answers_that_run_over_an_update_name_both_versions(
    engines: tuple[EngineClient, EngineClient], way: str, trainer: Trainer, request
) -> None:
    folder = request.getfixturevalue("dense").folders[0]
    transport = WAYS[way](trainer)
    trainer.weights = weights_in(folder)
    await update(transport, trainer, engines, 5)
    params = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
    running = [asyncio.create_task(engine.generate(PROMPT, params)) for engine in engines]
    await asyncio.sleep(0.2)
    await update(transport, trainer, engines, 6)
    for answer in await asyncio.gather(*running):
        versions = [span.version for span in answer.version_spans]
        assert versions in ([5, 6], [6], [5])  # how far an engine was is its own affair; nothing in between is named
        assert answer.version_spans[-1].end == 400
