"""How warm the router keeps prefixes, beside random placement, and what a turn costs in the router itself.

    python ci/benchmarks/router.py [--sessions 32] [--turns 24] [--engines 2] [--json FILE]

The traffic of an agent task: every session begins with the same system prompt, then a task of its own, then a model
call for each turn whose answer and observation are appended. Real engine processes, a small random model. The same
sessions are placed by affinity and at random, each on engines with an empty cache. `best` is what no placement can
beat: whatever was sent or sampled before is found again, as on one engine that serves everybody.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from async_workload import EngineProcess, save_model

from miles_contracts import SamplingParams
from miles_rollout.engine_client import EngineClient
from miles_rollout.router import Placement, Router, RouterConfig

PLACEMENTS = 200_000
"""Placements timed without an engine."""


@dataclass(frozen=True)
class Traffic:
    """Numbers of tokens and turns."""

    sessions: int
    turns: int
    system: int = 320
    task: int = 48
    answer: int = 32
    observation: int = 16

    @property
    def best(self) -> float:
        """Cached share of all prompt tokens when only what nobody has sent or sampled before is computed. The last
        sampled token of an answer has no cache entry of its own when the next turn begins."""
        step = self.answer + self.observation
        prompts = sum(self.system + self.task + turn * step for turn in range(self.turns))
        new = self.task + (self.turns - 1) * (self.observation + 1)
        return 1 - (self.system + self.sessions * new) / (self.sessions * prompts)


def tokens(seed: int, count: int) -> list[int]:
    """Ids that differ from seed to seed and never stop an answer."""
    return [1 + (seed * 7919 + i * 104729) % 250 for i in range(count)]


async def session(router: Router, index: int, traffic: Traffic) -> None:
    """One conversation of an agent."""
    history = tokens(0, traffic.system) + tokens(1 + index, traffic.task)
    for turn in range(traffic.turns):
        params = SamplingParams(max_new_tokens=traffic.answer, ignore_eos=True, seed=1000 * index + turn)
        result = await router.generate(f"session-{index}", history, params)
        history += [int(i) for i in result.output_ids]
        history += tokens(100_000 + 1000 * index + turn, traffic.observation)
    router.forget(f"session-{index}")


async def serve(clients: Sequence[EngineClient], placement: Placement, traffic: Traffic) -> dict[str, object]:
    """All sessions at once; hit rates and time."""
    for client in clients:
        await client.flush_cache()
    router = Router(clients, config=RouterConfig(placement=placement))
    began = time.perf_counter()
    await asyncio.gather(*(session(router, i, traffic) for i in range(traffic.sessions)))
    wall = time.perf_counter() - began
    metrics = router.metrics()
    engines = range(len(clients))
    found: dict[str, object] = {
        "hit_rate": metrics["rollout/prefix_cache_hit_rate"],
        "per_engine": [metrics[f"router/engine_{i}/prefix_cache_hit_rate"] for i in engines],
        "turns": [metrics[f"router/engine_{i}/turns"] for i in engines],
        "wall_s": wall,
    }
    each = ", ".join(f"{metrics[f'router/engine_{i}/prefix_cache_hit_rate']:.2%}" for i in engines)
    print(f"{placement.value:9} {found['hit_rate']:.2%} of prompt tokens cached ({each}), {wall:.1f} s")
    return found


def placement_cost() -> float:
    """Seconds of one placement in the table of 8 engines and 1,000 sessions."""
    from miles_rollout.router import RouterTable

    table = RouterTable([f"engine-{i}" for i in range(8)])
    began = time.process_time()
    for i in range(PLACEMENTS):
        name = table.place(f"session-{i % 1000}", 1000)
        assert name is not None
        table.done(name, 1000)
    return (time.process_time() - began) / PLACEMENTS


async def measure(processes: Sequence[EngineProcess], traffic: Traffic) -> dict[str, object]:
    """Both placements."""
    clients = [process.client() for process in processes]
    try:
        return {placement.value: await serve(clients, placement, traffic) for placement in Placement}
    finally:
        for client in clients:
            await client.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    traffic = Traffic(sessions=given.sessions, turns=given.turns)
    print(f"{traffic.sessions} sessions of {traffic.turns} turns on {given.engines} engines; best {traffic.best:.2%}")
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        processes = [EngineProcess(Path(name)) for _ in range(given.engines)]
        try:
            result = asyncio.run(measure(processes, traffic))
        finally:
            for process in processes:
                process.end()
    cost = placement_cost()
    print(f"a placement takes {cost * 1e6:.2f} us of processor time")
    if given.json:
        found = {"traffic": asdict(traffic), "best": traffic.best, "placement_s": cost} | result
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
