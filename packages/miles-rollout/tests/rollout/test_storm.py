"""Whatever happens to the engines, every prompt is trained once and with the tokens its seed stands for."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factories import BytesRenderer, CountingTasks, MemoryEngine

from miles_contracts import EngineError, Group, SamplingParams
from miles_rollout.buffer import GroupBuffer
from miles_rollout.generate import single_turn
from miles_rollout.ledger import Ledger, UnusedPolicy
from miles_rollout.router import Router, RouterConfig
from miles_rollout.scheduler import Scheduler
from miles_rollout.worker import RolloutWorker

STEPS, BATCH = 10, 3


class Storm:
    """Three engines, of which at most two are hurt at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engines = [MemoryEngine(f"http://e{i}", delay=0.001) for i in range(3)]
        self.router = Router(
            self.engines,
            version=0,
            config=RouterConfig(strikes=2, health_misses=1, health_deadline_s=0.02, max_reissues=20),
        )
        self.version = 0

    async def rage(self) -> None:
        """Hurt and heal engines until cancelled."""
        while True:
            await asyncio.sleep(self.random.random() * 0.004)
            victim = self.random.randrange(2)  # the third is always well
            engine = self.engines[victim]
            match self.random.randrange(4):
                case 0:
                    engine.dead = True
                case 1:
                    engine.hung.clear()
                case 2:
                    engine.failures += [EngineError(engine.url, "garbage")] * self.random.randrange(4)
                case 3:
                    self._heal(victim)
            await self.router.check_health()

    def _heal(self, victim: int) -> None:
        self.engines[victim].hung.set()
        fresh = MemoryEngine(f"http://e{victim}", delay=0.001)
        fresh.version = self.version if self.random.random() < 0.5 else None  # or with its first weights
        self.engines[victim] = fresh
        self.router.add_engine(fresh)

    def update(self, version: int) -> None:
        """New weights on all engines that answer."""
        self.version = version
        for engine in self.engines:
            if not engine.dead and engine.version is not None:
                engine.version = version
        self.router.set_version(version)

    def calm(self) -> None:
        """Nothing hangs any more."""
        for engine in self.engines:
            engine.hung.set()


async def run(storm: Storm, depth: int, *, weather: bool) -> list[Group]:
    worker = RolloutWorker(
        source=CountingTasks(),
        generate=single_turn(
            renderer=BytesRenderer(),
            router=storm.router,
            reward=lambda task, text: float(len(text)),
            sampling=SamplingParams(max_new_tokens=8),
            run_seed=5,
        ),
        buffer=GroupBuffer(max_groups=16),
        scheduler=Scheduler(batch_groups=BATCH, group_size=2, depth=depth),
        ledger=Ledger(on_failure=UnusedPolicy.RETRY, on_stale=UnusedPolicy.RETRY, max_retries=100),
    )
    raging = asyncio.create_task(storm.rage()) if weather else None
    trained: list[Group] = []
    await worker.start(0)
    for step in range(STEPS):
        batch = (await worker.collect(BATCH, train_version=step)).groups
        worker.confirm(batch)
        trained += batch
        storm.update(step + 1)
        worker.set_engine_version(step + 1)
    if raging is not None:
        raging.cancel()
        await asyncio.gather(raging, return_exceptions=True)
    storm.calm()
    await worker.close()
    await storm.router.close()
    assert storm.router.metrics()["router/outstanding_tokens"] == 0
    return trained


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), depth=st.integers(0, 2))
def test_a_storm_costs_only_time(seed: int, depth: int) -> None:
    async def both() -> tuple[list[Group], list[Group]]:
        return await run(Storm(seed), depth, weather=True), await run(Storm(seed), depth, weather=False)

    stormy, calm = asyncio.run(both())
    prompts = [g.prompt_index for g in stormy]
    assert len(set(prompts)) == len(prompts) == STEPS * BATCH
    tokens = {(g.prompt_index, g.attempt): [t.token_ids.tolist() for t in g] for g in calm}
    for group in stormy:
        if (group.prompt_index, group.attempt) in tokens:
            assert [t.token_ids.tolist() for t in group] == tokens[group.prompt_index, group.attempt]
    if depth == 0:
        assert prompts == [g.prompt_index for g in calm] == list(range(STEPS * BATCH))
