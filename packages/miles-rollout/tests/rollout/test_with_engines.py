"""The rollout half over two real engine processes: same tokens whatever happens, and faults that cost only time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from rollout_engines import EngineProcess, until
from rollout_factories import BytesRenderer, CountingTasks

from miles_contracts import Generate, Group, PauseMode, SamplingParams, Status, wire
from miles_rollout.buffer import GroupBuffer
from miles_rollout.engine_client import EngineClient
from miles_rollout.evaluation import DedicatedEvaluator, HeldOut, SharedEvaluation
from miles_rollout.generate import single_turn
from miles_rollout.router import Router, RouterConfig
from miles_rollout.scheduler import Scheduler
from miles_rollout.worker import RolloutWorker, WorkerConfig, WorkerState

FAST = RouterConfig(health_interval_s=0.2, health_deadline_s=2.0, health_misses=2, no_engine_s=120)


def make_generate(router: Router, *, max_new_tokens: int = 24) -> Generate:
    return single_turn(
        renderer=BytesRenderer(),
        router=router,
        reward=lambda task, response: float(len(response)),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        run_seed=11,
        max_tokens=512,
    )


def make_worker(router: Router, *, depth: int = 0, max_new_tokens: int = 24) -> RolloutWorker:
    return RolloutWorker(
        source=CountingTasks(),
        generate=make_generate(router, max_new_tokens=max_new_tokens),
        buffer=GroupBuffer(max_groups=16),
        scheduler=Scheduler(batch_groups=4, group_size=2, depth=depth),
        config=WorkerConfig(episode_timeout_s=120),
    )


def tokens(groups: Sequence[Group]) -> list:
    return [(g.prompt_index, [(t.token_ids.tolist(), t.reward, t.status) for t in g]) for g in groups]


@pytest.fixture
async def clients(processes: list[EngineProcess]) -> AsyncIterator[list[EngineClient]]:
    made = [await p.client() for p in processes]
    yield made
    for client in made:
        await client.close()


async def run_steps(
    router: Router, count: int, *, max_new_tokens: int = 24, before_step: Callable[[int], Awaitable[None]] | None = None
) -> list:
    """The batches of a synchronous run whose weights never change."""
    worker = make_worker(router, max_new_tokens=max_new_tokens)
    await worker.start(0)
    out = []
    for step in range(count):
        if before_step is not None:
            await before_step(step)
        batch = (await worker.collect(4, train_version=0)).groups
        worker.confirm(batch)
        worker._scheduler.set_versions(next_train=0)
        worker._fill()
        out.append(tokens(batch))
    assert worker.metrics()["rollout/failed_ratio"] == 0.0
    await worker.close()
    return out


async def test_same_tokens_on_one_engine_and_on_two(clients: list[EngineClient]) -> None:
    one = await run_steps(Router(clients[:1]), 3)
    two = await run_steps(Router(clients), 3)
    assert one == two
    sampled = [t for batch in one for _, members in batch for t in members]
    assert {s for _, _, s in sampled} <= {Status.FINISHED, Status.TRUNCATED}
    assert len({tuple(ids) for ids, _, _ in sampled}) == len(sampled), "members of a group differ"


async def test_log_probs_and_versions_arrive(clients: list[EngineClient]) -> None:
    worker = make_worker(Router(clients))
    await worker.start(0)
    groups = (await worker.collect(4, train_version=0)).groups
    await worker.close()
    for trajectory in (t for g in groups for t in g):
        assert trajectory.oldest_version == trajectory.newest_version == 0
        assert trajectory.num_trained == trajectory.num_sampled == trajectory.turns[0].end - trajectory.turns[0].start
        ended_itself = trajectory.token_ids[-1] == 0
        assert trajectory.status is (Status.FINISHED if ended_itself else Status.TRUNCATED)


async def test_an_engine_killed_in_the_middle_costs_only_time(
    processes: list[EngineProcess], clients: list[EngineClient]
) -> None:
    undisturbed = await run_steps(Router(clients), 3, max_new_tokens=200)
    router = Router(clients, config=FAST, version=0)
    await router.start()

    async def kill_one(step: int) -> None:
        if step == 1:
            await until(lambda: router._table.slots[processes[0].url].outstanding > 0)
            processes[0].kill()

    assert await run_steps(router, 3, max_new_tokens=200, before_step=kill_one) == undisturbed
    assert router.reissued_turns > 0
    assert list(router.quarantined) == [processes[0].url]
    # It comes back with the weights of its folder; the run is at version 0, so that is what it must serve.
    processes[0].launch()
    processes[0].wait_ready()
    router.add_engine(clients[0])
    await until(lambda: not router.quarantined)
    await router.close()


async def test_a_restarted_engine_waits_for_the_current_weights(
    processes: list[EngineProcess], clients: list[EngineClient], tiny_model: Path, other_weights: Path
) -> None:
    for client in clients:
        await client.load_from_disk(other_weights, 3)
    router = Router(clients, config=FAST, version=3)
    await router.start()
    processes[1].kill()
    await until(lambda: processes[1].url in router.quarantined)
    processes[1].launch()
    processes[1].wait_ready()
    router.add_engine(clients[1])
    await until(lambda: "serves version 0, the current one is 3" in router.quarantined.get(processes[1].url, ""))
    for index in range(4):
        await router.generate(f"s{index}", [1, 2, 3], SamplingParams(max_new_tokens=2, seed=1))
    assert router.metrics()["router/engine_1/turns"] == 0
    await clients[1].load_from_disk(other_weights, 3)
    await until(lambda: not router.quarantined)
    await router.close()
    for client in clients:  # as the other tests expect them
        await client.load_from_disk(tiny_model, 0)


async def test_a_frozen_engine_is_found_and_its_turns_move(
    processes: list[EngineProcess], clients: list[EngineClient]
) -> None:
    undisturbed = await run_steps(Router(clients), 1)
    router = Router(clients, config=FAST, version=0)
    await router.start()
    processes[0].freeze()
    try:
        assert await run_steps(router, 1) == undisturbed
        assert router.reissued_turns > 0
        assert "health check" in router.quarantined[processes[0].url]
    finally:
        processes[0].thaw()
    await until(lambda: not router.quarantined)
    await router.close()


@pytest.mark.parametrize("fault", ["500", "garbage", "cut"])
async def test_an_engine_that_answers_nonsense_is_left(clients: list[EngineClient], fault: str) -> None:
    """A proxy in front of the first engine spoils every generation."""
    undisturbed = await run_steps(Router(clients), 1)

    async def forward(request: web.Request) -> web.StreamResponse:
        async with ClientSession() as session:
            async with session.request(request.method, clients[0].url + request.path, data=await request.read()) as got:
                body = await got.read()
        if request.path != "/generate":
            return web.Response(body=body, content_type="application/json")
        if fault == "500":
            return web.Response(status=500, text="CUDA error: an illegal memory access was encountered")
        return web.Response(body=b"{]" if fault == "garbage" else body[:-20], content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    bad = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    router = Router([bad, clients[1]], version=0)
    assert await run_steps(router, 1) == undisturbed
    assert router.reissued_turns > 0
    assert "failures in a row" in router.quarantined[bad.url]
    await bad.close()
    await runner.cleanup()


async def test_rewards_that_raise_or_hang_fail_their_groups_only(clients: list[EngineClient]) -> None:
    async def reward(task, response: str) -> float:
        if task.prompt_index == 0:
            raise RuntimeError("judge crashed")
        if task.prompt_index == 1:
            await asyncio.Event().wait()
        return 1.0

    router = Router(clients)
    generate = single_turn(
        renderer=BytesRenderer(),
        router=router,
        reward=reward,
        sampling=SamplingParams(max_new_tokens=24),
        run_seed=1,
        reward_timeout_s=0.2,
    )
    seen: list[str | None] = []
    buffer = GroupBuffer(max_groups=8)
    judge = buffer.judge
    buffer.judge = lambda g: seen.extend(t.error for t in g if t.error) or judge(g)
    worker = RolloutWorker(
        source=CountingTasks(),
        generate=generate,
        buffer=buffer,
        scheduler=Scheduler(batch_groups=2, group_size=2),
    )
    await worker.start(0)
    groups = (await worker.collect(2, train_version=0)).groups
    assert [g.prompt_index for g in groups] == [2, 3]
    reasons = {reason.partition(" (")[0] for reason in seen}
    assert reasons == {"reward raised RuntimeError: judge crashed", "reward gave no answer within 0.2 s"}
    assert worker.metrics()["rollout/fully_async/aborted_groups_filtered"] == 2
    await worker.close()


@pytest.mark.parametrize("depth", [0, 2])
async def test_killed_and_resumed_with_groups_in_flight(clients: list[EngineClient], depth: int) -> None:
    """What a driver that dies leaves behind is its last checkpoint; the tokens after it are the same."""
    router = Router(clients, version=0)
    generate = make_generate(router)
    first = make_worker(router, depth=depth)
    await first.start(0)
    trained = list((await first.collect(4, train_version=0)).groups)
    first.confirm(trained)
    await asyncio.sleep(0.02)
    frame = wire.encode(first.state())
    await first.close()
    second = make_worker(router, depth=depth)
    second.restore(wire.decode(frame, WorkerState))
    await second.start(0)
    for _ in range(depth + 1):
        batch = (await second.collect(4, train_version=0)).groups
        second.confirm(batch)
        second._scheduler.set_versions(next_train=0)  # nothing is updated here
        trained += batch
    await second.quiesce(deadline_s=60)
    rest = second.state()
    await second.close()
    done = [g.prompt_index for g in trained]
    assert len(set(done)) == len(done) == 4 * (depth + 2)
    left = [e.group.prompt_index for e in rest.entries] + [i.prompt_index for i in rest.again]
    assert sorted(done + left) == list(range(rest.source["next"]))
    for group in trained:
        for t in group:
            again = await generate(CountingTasks().at(group.prompt_index), t.identity.member, 0)
            assert again[0].token_ids.tolist() == t.token_ids.tolist()


async def test_affinity_keeps_the_prefix_warm_and_random_routing_does_not(clients: list[EngineClient]) -> None:
    """Eight sessions of 24 turns over two engines. By affinity a turn computes what is new in it, 3 tokens, and a
    session's first at most its 129: in any order of events at least 96.6 % of all prompt tokens are found again."""
    rates = {}
    for placement in ("affinity", "random"):
        for client in clients:
            await client.flush_cache()
        router = Router(clients, config=RouterConfig(placement=placement))
        await asyncio.gather(*(_session(router, i) for i in range(8)))
        rates[placement] = router.metrics()["rollout/prefix_cache_hit_rate"]
    assert rates["affinity"] >= 0.966
    assert rates["random"] < rates["affinity"]


async def _session(router: Router, index: int) -> None:
    history = [*range(2, 130), 1 + index]
    for turn in range(24):
        params = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=index * 100 + turn)
        result = await router.generate(f"session-{index}", history, params)
        history += [int(i) for i in result.output_ids] + [turn + 1, index + 1]


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_an_update_in_the_middle_shows_in_every_token(
    clients: list[EngineClient], tiny_model: Path, other_weights: Path, mode: PauseMode
) -> None:
    router = Router(clients, version=0)
    worker = make_worker(router, depth=1, max_new_tokens=400)
    await worker.start(0)
    await until(lambda: sum(slot.outstanding for slot in router._table.slots.values()) > 0)
    await asyncio.sleep(0.2)
    for client in clients:
        await client.pause(mode)
    for client in clients:
        await client.load_from_disk(other_weights, 1)
    for client in clients:
        await client.resume()
    router.set_version(1)
    groups = (await worker.collect(4, train_version=1)).groups
    worker.set_engine_version(1)
    await worker.quiesce(deadline_s=120)
    groups += (await worker.collect(4, train_version=2)).groups
    trajectories = [t for g in groups for t in g]
    mixed = [t for t in trajectories if t.oldest_version != t.newest_version]
    assert mixed, "the update came while something was sampled"
    for t in mixed:
        assert [s.version for s in t.version_spans] == [0, 1]
        assert t.version_spans[0].end == t.version_spans[1].start
    assert not any(t.status is Status.ABORTED for t in trajectories)
    metrics = worker.metrics()
    assert metrics["rollout/failed_ratio"] == 0.0
    assert metrics["rollout/fully_async/generation_span"] > 0
    await worker.close()
    for client in clients:
        await client.load_from_disk(tiny_model, 0)


async def test_dedicated_engine_measures_the_snapshot_and_nothing_else(
    clients: list[EngineClient], tiny_model: Path, other_weights: Path
) -> None:
    """The first engine trains on at version 0 while the second measures snapshots."""
    fleet, own = Router(clients[:1], version=0), Router(clients[1:])

    def held_out(router: Router) -> HeldOut:
        return HeldOut(name="t", source=CountingTasks(), generate=make_generate(router), prompts=6, samples=2, ks=(2,))

    evaluator = DedicatedEvaluator(engines=clients[1:], router=own, tasks=[held_out(own)])
    worker = make_worker(fleet, depth=1)
    await worker.start(0)
    measured = dict(await evaluator(5, other_weights))
    assert len((await worker.collect(4, train_version=0)).groups) == 4, "training was not disturbed"
    assert measured["eval/t/weight_version/mean"] == 5
    assert measured["eval/t/weight_version/mixed_version_ratio"] == 0
    # The same weights on the shared engines give the same figures: sampling depends on seeds and weights only.
    await worker.quiesce(deadline_s=60)
    await clients[0].load_from_disk(other_weights, 5)
    point = await SharedEvaluation(worker=worker, tasks=[held_out(fleet)]).run(5)
    assert {k: point.metrics[k] for k in measured} == measured
    await worker.close()
    for client in clients:
        await client.load_from_disk(tiny_model, 0)
