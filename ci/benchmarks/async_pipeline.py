"""What running rollout beside training is worth under a heavy tail.

    python ci/benchmarks/async_pipeline.py [--steps 23] [--train-s 0.4] [--json FILE]

One engine process; every episode samples from it and then waits for an environment whose delay is Pareto (20 x tail).
The trainer is a stand-in that is busy for a fixed time, so that the figures show scheduling and nothing else; after
each step the engine is paused, really loads weights and goes on. The same episodes at pipeline depth 0, 1, 4 and fully
asynchronous, the last two also strictly in the order of prompts; before them rollout alone and training alone, which
bound what any schedule can reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from async_workload import EngineProcess, NumberedTasks, delayed_generate, save_model

from miles_contracts import PauseMode
from miles_rollout.buffer import GroupBuffer
from miles_rollout.engine_client import EngineClient
from miles_rollout.order import TrainingOrder
from miles_rollout.router import Router
from miles_rollout.scheduler import Scheduler
from miles_rollout.worker import RolloutWorker, WorkerConfig

BATCH, GROUP, WARM = 8, 4, 3
DEEP = 24
"""Pipeline depth of the fully asynchronous runs: what is in flight, and not the depth, bounds them."""
RUNS = {
    "depth 0": (0, TrainingOrder.ARRIVAL),
    "depth 1": (1, TrainingOrder.ARRIVAL),
    "depth 4": (4, TrainingOrder.ARRIVAL),
    "depth 4, by prompt": (4, TrainingOrder.PROMPT),
    "fully asynchronous": (DEEP, TrainingOrder.ARRIVAL),
    "the same, by prompt": (DEEP, TrainingOrder.PROMPT),
}
"""Depth and order of training of what is compared."""


@dataclass
class Settings:
    """One comparison."""

    steps: int
    train_s: float
    scale_s: float
    alpha: float
    tail: float
    in_flight: int
    new_tokens: int


@dataclass
class Result:
    """Per step after the warm-up, in seconds, shares and optimiser updates."""

    name: str
    step_s: float
    trainer_idle: float
    engine_idle: float
    avg_staleness: float
    max_staleness: float
    trajectories_per_s: float


class BusyMeter:
    """Share of the time in which the engine computes nothing, by its own account."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._began = self._busy_s = 0.0

    async def _now(self) -> tuple[float, float]:
        busy_s = (await self._client.server_info())["busy_s"]
        return time.perf_counter(), busy_s

    async def start(self) -> None:
        """From now on."""
        self._began, self._busy_s = await self._now()

    async def idle(self) -> float:
        """The share until now."""
        now, busy_s = await self._now()
        return 1.0 - (busy_s - self._busy_s) / (now - self._began)


def make_worker(router: Router, settings: Settings, depth: int, order: TrainingOrder) -> RolloutWorker:
    """The real worker over the delayed episodes."""
    return RolloutWorker(
        source=NumberedTasks(),
        generate=delayed_generate(
            router,
            scale_s=settings.scale_s,
            alpha=settings.alpha,
            tail=settings.tail,
            max_new_tokens=settings.new_tokens,
        ),
        buffer=GroupBuffer(max_groups=2 * BATCH, order=order),
        scheduler=Scheduler(batch_groups=BATCH, group_size=GROUP, depth=depth, max_trajectories=settings.in_flight),
        config=WorkerConfig(tokens_per_trajectory=settings.new_tokens + 32),
    )


async def update(client: EngineClient, folder: Path, version: int) -> None:
    """Really change the engine's weights (to the same ones) while requests run."""
    await client.pause(PauseMode.IN_PLACE)
    try:
        await client.load_from_disk(folder, version)
    finally:
        await client.resume()


async def run(
    name: str,
    client: EngineClient,
    folder: Path,
    settings: Settings,
    *,
    depth: int,
    train: bool = True,
    order: TrainingOrder = TrainingOrder.ARRIVAL,
) -> Result:
    """`steps` steps of the driver's loop; without training the batches are thrown away as fast as they come."""
    await client.load_from_disk(folder, 0)
    await client.flush_cache()
    router = Router([client])
    worker = make_worker(router, settings, depth, order)
    await worker.start(0)
    waits: list[float] = []
    steps: list[float] = []
    staleness: list[tuple[float, float]] = []
    meter = BusyMeter(client)
    for step in range(settings.steps):
        if step == WARM:
            await meter.start()
        began = time.perf_counter()
        batch = await worker.collect(BATCH, train_version=step)
        waits.append(time.perf_counter() - began)
        worker.confirm(batch.groups)
        metrics = worker.metrics()
        staleness.append((metrics["rollout/fully_async/avg_staleness"], metrics["rollout/fully_async/max_staleness"]))
        if train:
            await asyncio.sleep(settings.train_s)
            await update(client, folder, step + 1)
        worker.set_engine_version(step + 1)
        steps.append(time.perf_counter() - began)
    idle = await meter.idle()
    await worker.close()
    wall = sum(steps[WARM:])
    return Result(
        name=name,
        step_s=wall / len(steps[WARM:]),
        trainer_idle=sum(waits[WARM:]) / wall,
        engine_idle=idle,
        avg_staleness=statistics.fmean(a for a, _ in staleness[WARM:]),
        max_staleness=max(m for _, m in staleness[WARM:]),
        trajectories_per_s=BATCH * GROUP * len(steps[WARM:]) / wall,
    )


async def training_alone(client: EngineClient, folder: Path, settings: Settings) -> float:
    """Seconds of a step whose batch is always there."""
    await client.load_from_disk(folder, 0)
    began = time.perf_counter()
    for step in range(5):
        await asyncio.sleep(settings.train_s)
        await update(client, folder, step + 1)
    return (time.perf_counter() - began) / 5


async def pipeline(client: EngineClient, folder: Path, settings: Settings) -> dict[str, object]:
    """The whole comparison."""
    alone = await run("rollout alone", client, folder, settings, depth=DEEP, train=False)
    training = await training_alone(client, folder, settings)
    results = [
        await run(name, client, folder, settings, depth=depth, order=order) for name, (depth, order) in RUNS.items()
    ]
    bound = max(alone.step_s, training)
    print(f"rollout alone {alone.step_s:.3f} s a step, training alone {training:.3f} s; the bound is {bound:.3f} s")
    print(f"{'':20}{'s/step':>9}{'of bound':>10}{'trainer idle':>14}{'engine idle':>13}{'staleness avg':>15}{'max':>5}")
    for r in results:
        print(
            f"{r.name:20}{r.step_s:9.3f}{bound / r.step_s:10.1%}{r.trainer_idle:14.1%}{r.engine_idle:13.1%}"
            f"{r.avg_staleness:15.2f}{r.max_staleness:5.0f}"
        )
    return {
        "settings": asdict(settings),
        "rollout_alone_s": alone.step_s,
        "training_alone_s": training,
        "results": [asdict(r) | {"of_bound": bound / r.step_s} for r in results],
    }


async def measure(settings: Settings, process: EngineProcess, folder: Path) -> dict[str, object]:
    """The comparison on one engine."""
    client = process.client()
    try:
        return await pipeline(client, folder, settings)
    finally:
        await client.close()


def parse(doc: str | None) -> tuple[Settings, Path | None]:
    """Settings of the workload and the file for results, from the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--train-s", type=float, default=0.4)
    parser.add_argument("--scale-s", type=float, default=0.25, help="shortest delay of an environment")
    parser.add_argument("--alpha", type=float, default=1.5)
    parser.add_argument("--tail", type=float, default=20.0)
    parser.add_argument("--in-flight", type=int, default=64, help="trajectories in flight at most")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = vars(parser.parse_args())
    target: Path | None = given.pop("json")
    return Settings(**given), target


def main() -> None:
    """Command line."""
    settings, target = parse(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        process = EngineProcess(folder)
        try:
            result = asyncio.run(measure(settings, process, folder))
        finally:
            process.end()
    if target is not None:
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
