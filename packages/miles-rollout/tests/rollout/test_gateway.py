"""Turns through a real sglang-router process to two real engines: sessions stick, faults cost only time."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from rollout_engines import EngineProcess, until

from miles_contracts import EngineError, InvalidFieldError, SamplingParams
from miles_rollout.engine_client import EngineClient
from miles_rollout.router import RouterConfig, gateway
from miles_rollout.router.gateway import GatewayClient, GatewayRouter, Workers, gateway_arguments, require_gateway

pytest.importorskip("sglang_router")
FAST = RouterConfig(health_interval_s=0.2, health_deadline_s=2.0, health_misses=2, no_engine_s=120)
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


class GatewayProcess:
    """sglang-router on this machine."""

    def __init__(self) -> None:
        self.port, self._metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes]

    def launch(self) -> None:
        arguments = gateway_arguments("127.0.0.1", self.port, self._metrics_port)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen([sys.executable, "-m", gateway.MODULE, *arguments], env=environment)

    async def ready(self) -> None:
        workers = Workers(self.url)
        async with asyncio.timeout(120):
            while not await workers.ready():  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.1)
        await workers.close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def process() -> Iterator[GatewayProcess]:
    made = GatewayProcess()
    made.launch()
    yield made
    made.end()


@pytest.fixture
async def clients(processes: list[EngineProcess]) -> AsyncIterator[list[EngineClient]]:
    made = [await p.client() for p in processes]
    yield made
    for client in made:
        await client.close()


@pytest.fixture
async def workers(process: GatewayProcess) -> AsyncIterator[Workers]:
    await process.ready()
    made = Workers(process.url)
    yield made
    await made.close()


@pytest.fixture
async def router(
    process: GatewayProcess, workers: Workers, clients: list[EngineClient]
) -> AsyncIterator[GatewayRouter]:
    front = GatewayClient(process.url)
    made = GatewayRouter(clients, front, workers=workers, config=FAST)
    await made.start()
    yield made
    await made.close()
    await front.close()


def prompt(session: int, turn: int) -> list[int]:
    return [1 + session, *range(1, 120 + 30 * turn)]


async def test_answers_are_those_of_the_engines(router: GatewayRouter, clients: list[EngineClient]) -> None:
    through = await router.generate("a", prompt(0, 0), GREEDY)
    direct = await clients[0].generate(prompt(0, 0), GREEDY)
    assert through.output_ids.tolist() == direct.output_ids.tolist()
    assert through.logprobs == pytest.approx(direct.logprobs, abs=1e-5)
    assert through.version_spans == direct.version_spans
    seeded = SamplingParams(max_new_tokens=16, seed=5, ignore_eos=True)
    one, two = await router.generate("a", [1, 2], seeded), await clients[1].generate([1, 2], seeded)
    assert one.output_ids.tolist() == two.output_ids.tolist()


async def test_an_answer_is_shown_while_it_grows(router: GatewayRouter) -> None:
    seen: list[int] = []
    long = SamplingParams(max_new_tokens=600, temperature=0.0, ignore_eos=True)
    result = await router.generate("a", [1, 2, 3], long, on_partial=lambda ids: seen.append(len(ids)) or False)
    assert seen
    assert seen == sorted(seen)
    assert seen[0] < seen[-1] <= len(result.output_ids) == 600


async def test_sessions_stick_and_both_engines_are_used(router: GatewayRouter, clients: list[EngineClient]) -> None:
    for client in clients:
        await client.flush_cache()
    for turn in range(5):
        await asyncio.gather(*(router.generate(f"session-{s}", prompt(s, turn), GREEDY) for s in range(8)))
    found = router.metrics()
    # All but the first prompt, and of the later ones all but the 30 new tokens, is found where the session sticks.
    total = sum(len(prompt(0, turn)) for turn in range(5))
    assert found["rollout/prefix_cache_hit_rate"] > 0.9 * (total - len(prompt(0, 0)) - 4 * 31) / total
    assert found["router/outstanding_tokens"] == 0
    homes = []
    for s in range(8):
        cached = [(await client.generate(prompt(s, 4), GREEDY)).cached_tokens or 0 for client in clients]
        homes.append(cached.index(max(cached)))
        assert max(cached) > len(prompt(s, 3))
        assert min(cached) == 0
    assert set(homes) == {0, 1}


async def test_a_killed_worker_loses_no_turn_and_comes_back(
    router: GatewayRouter, workers: Workers, processes: list[EngineProcess], clients: list[EngineClient]
) -> None:
    long = SamplingParams(max_new_tokens=400, seed=3, ignore_eos=True)
    expected = await asyncio.gather(*(clients[0].generate(prompt(s, 0), long) for s in range(6)))
    turns = [asyncio.create_task(router.generate(f"kill-{s}", prompt(s, 0), long)) for s in range(6)]
    await until(lambda: router.metrics()["router/outstanding_tokens"] > 0)
    await asyncio.sleep(0.1)  # some of them are under way
    processes[1].kill()
    results = await asyncio.gather(*turns)
    assert [r.output_ids.tolist() for r in results] == [r.output_ids.tolist() for r in expected]
    await until(lambda: clients[1].url in router.quarantined)
    await router.check_health()
    assert list(await workers.listed()) == [clients[0].url]
    await asyncio.gather(*(router.generate(f"kill-{s}", prompt(s, 1), GREEDY) for s in range(6)))
    processes[1].launch()
    await asyncio.to_thread(processes[1].wait_ready)
    await until(lambda: not router.quarantined)
    await router.check_health()
    assert sorted(await workers.listed()) == sorted(c.url for c in clients)


async def test_an_engine_with_old_weights_is_taken_off_the_list(
    router: GatewayRouter, workers: Workers, clients: list[EngineClient], tiny_model
) -> None:
    await clients[0].load_from_disk(tiny_model, 1)
    router.set_version(1)
    await router.check_health()
    assert list(await workers.listed()) == [clients[0].url]
    assert "it serves version 0" in router.quarantined[clients[1].url]
    await clients[1].load_from_disk(tiny_model, 1)
    await router.check_health()
    assert sorted(await workers.listed()) == sorted(c.url for c in clients)
    for client in clients:
        await client.load_from_disk(tiny_model, 0)


async def test_sglang_router_dies_and_is_started_again(
    router: GatewayRouter, process: GatewayProcess, workers: Workers, clients: list[EngineClient]
) -> None:
    process.end()
    turn = asyncio.create_task(router.generate("again", [1, 2, 3], GREEDY))
    await until(lambda: router.reissued_turns > 0)
    process.launch()
    assert len((await turn).output_ids) == 16
    await router.check_health()
    assert sorted(await workers.listed()) == sorted(c.url for c in clients)


async def test_what_cannot_go_through_is_refused(router: GatewayRouter) -> None:
    with pytest.raises(InvalidFieldError, match="drops expert choices"):
        await router.generate("a", [1, 2], GREEDY, routing=True)
    with pytest.raises(EngineError, match="input_ids"):
        await router.generate("a", [1, 100_000], GREEDY)
    assert router.reissued_turns == 0


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0", "unknown"])
def test_versions_that_are_not_known_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(InvalidFieldError, match=r"pip install 'sglang-router>=0\.3\.2,<0\.4'"):
        require_gateway()


def test_the_installed_version_is_known() -> None:
    assert require_gateway() == importlib.metadata.version("sglang-router")


def test_no_sglang_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InvalidFieldError, match="not installed"):
        require_gateway()
