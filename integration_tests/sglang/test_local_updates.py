"""Real SGLang in the local transport when somebody dies inside an update: no handle outlives what it opened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from recipe_runs import descendants
from sender_process import SenderProcess
from server import embedded_engine, sglang_server
from sglang_models import write_dense
from test_weight_updates import BUCKET_BYTES, greedy, update, weights_in
from weight_trainer import Trainer

from miles_contracts import PauseMode
from miles_loop.senders import make_sender
from miles_loop.sglang_weights import with_checks
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import LocalTransport
from miles_rollout.engine_client import EngineClient
from miles_sync import FleetFencedError, update_weights

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

LOCAL = SenderSettings(transport="local", bucket_bytes=BUCKET_BYTES)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    made = (tmp_path / "a", tmp_path / "b")
    for seed, folder in enumerate(made):
        write_dense(folder, seed)
    return made


async def assert_alike(one: EngineClient, other: EngineClient, version: int) -> None:
    assert [await engine.weight_version() for engine in (one, other)] == [version] * 2
    (ids, logprobs), (same_ids, same_logprobs) = await greedy(one), await greedy(other)
    assert ids == same_ids
    np.testing.assert_allclose(logprobs, same_logprobs, atol=2e-5)


def schedulers() -> set[int]:
    """Those of every SGLang that this session has started."""
    return {pid for pid, line in descendants(os.getpid()).items() if "sglang::scheduler" in line}


async def test_an_sglang_that_dies_inside_an_update_takes_nothing_from_the_others(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    trainer = Trainer(make_sender(LOCAL), weights_in(folders[0]))
    transport = LocalTransport(trainer)
    others = schedulers()
    with embedded_engine(folders[0], tmp_path / "embedded.log") as ours:
        with sglang_server(folders[0], tmp_path / "sglang.log", "--weight-version", "0") as theirs:
            (scheduler,) = schedulers() - others
            async with EngineClient(theirs) as sglang, EngineClient(ours) as embedded:
                await update(transport, trainer, (sglang, embedded), 1)
                await assert_alike(sglang, embedded, 1)
                before = await greedy(embedded)

                def kill(bucket: object) -> None:
                    if bucket.index == 2:
                        os.kill(scheduler, signal.SIGKILL)

                trainer.weights, trainer.before = weights_in(folders[1]), kill
                with pytest.raises(FleetFencedError) as caught:
                    await update(transport, trainer, (sglang, embedded), 2)
                assert not caught.value.committed
                assert (caught.value.report.serving, caught.value.report.fenced) == ((embedded.url,), (sglang.url,))
                assert await embedded.weight_version() == 1
                assert (await greedy(embedded))[0] == before[0]
        trainer.before = lambda bucket: None
        with sglang_server(folders[0], tmp_path / "sglang.log", "--weight-version", "0") as again:
            async with EngineClient(again) as sglang, EngineClient(ours) as embedded:
                await update(transport, trainer, (sglang, embedded), 2)
                await assert_alike(sglang, embedded, 2)
    trainer.sender.close()


async def test_a_trainer_that_dies_inside_an_update_leaves_an_sglang_that_waits_for_a_whole_one(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    dying = SenderProcess(LOCAL, folders[1])
    trainer = Trainer(dying, weights_in(folders[1]))
    with (
        embedded_engine(folders[0], tmp_path / "embedded.log") as ours,
        sglang_server(folders[0], tmp_path / "sglang.log", "--weight-version", "0") as theirs,
    ):
        async with EngineClient(theirs) as sglang, EngineClient(ours) as embedded:
            before = await greedy(embedded)
            trainer.before = lambda bucket: dying.kill() if bucket.index == 2 else None
            with pytest.raises(FleetFencedError, match="the sender failed") as caught:
                await update(LocalTransport(trainer), trainer, (sglang, embedded), 1)
            assert not caught.value.committed
            assert caught.value.report.serving == (embedded.url,)
            assert (await greedy(embedded))[0] == before[0]
            assert await embedded.weight_version() == 0
            # SGLang has survived the memory that it had open, and says of itself that it is between two versions.
            assert await sglang.weight_version() is None
            another = Trainer(make_sender(LOCAL), weights_in(folders[1]))
            await update(LocalTransport(another), another, (sglang, embedded), 1)
            await assert_alike(sglang, embedded, 1)
            another.sender.close()


async def test_each_tensor_parallel_rank_opens_a_handle_of_its_own(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # one core is enough for both
    trainer = Trainer(make_sender(LOCAL), weights_in(folders[1]))
    trainer.model = folders[1]  # so that what each rank holds is compared with what it was sent
    with sglang_server(folders[0], tmp_path / "sglang.log", "--tp", "2", "--weight-version", "0") as url:
        async with EngineClient(url) as sglang:
            handles = []
            trainer.before = lambda bucket: handles.append(len(bucket.handles_of(url)))
            engines = await LocalTransport(trainer).connect([sglang])
            report = await update_weights(engines, trainer, version=1, mode=PauseMode.RETRACT, deadline_s=120)
            assert set(handles) == {2}
            assert report.num_buckets == len(handles) > 1
            (check,) = with_checks(report, engines).checks
            assert (check.compared > 30, check.not_compared) == (True, {})
            assert await sglang.weight_version() == 1
    trainer.sender.close()
