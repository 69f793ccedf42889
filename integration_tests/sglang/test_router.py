"""SGLang's router in front of a real SGLang and an embedded engine that serve the same model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_contracts import SamplingParams
from miles_loop.audit import EngineRecords
from miles_loop.gateway import Gateway, gateway_spec
from miles_loop.ports import choose_ports
from miles_loop.serving import ServingChild
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.router import RouterConfig

pytestmark = pytest.mark.sglang
pytest.importorskip("sglang_router")
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def prompt(session: int) -> list[int]:
    return [5 + session, *range(10, 60)]


async def test_sessions_of_a_mixed_fleet_get_the_answers_of_their_engines(dense, tmp_path: Path) -> None:
    front = Gateway(
        ServingChild(
            lambda ports: gateway_spec("127.0.0.1", *ports), tmp_path / "router.log", choose_ports("127.0.0.1", 0, 2)
        ),
        deadlines=Deadlines(generate=120.0),
        start_timeout_s=120.0,
        restarts=0,
        on_event=print,
    )
    clients = [EngineClient(url) for url in (dense.sglang, dense.embedded)]
    await front.process.start()
    try:
        await front.wait_ready()
        for client in clients:
            await client.flush_cache()
        router, evaluation = front.routers(clients, clients, EngineRecords(), RouterConfig())
        await router.start()
        first = await asyncio.gather(*(router.generate(f"s{s}", prompt(s), GREEDY) for s in range(6)))
        again = await asyncio.gather(*(router.generate(f"s{s}", prompt(s), GREEDY) for s in range(6)))
        direct = [await clients[1].generate(prompt(s), GREEDY) for s in range(6)]
        assert [r.output_ids.tolist() for r in first] == [r.output_ids.tolist() for r in direct]
        assert all((r.cached_tokens or 0) > 40 for r in again), "a session has left its engine"
        assert [span.version for r in first for span in r.version_spans] == [
            span.version for r in direct for span in r.version_spans
        ]
        other = await evaluation.generate("s0", prompt(0), GREEDY)
        assert other.output_ids.tolist() == direct[0].output_ids.tolist()
        await router.close()
    finally:
        await front.close(5.0)
        for client in clients:
            await client.close()
