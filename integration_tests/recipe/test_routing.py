"""Expert choices on their way: engine -> session server -> trajectory -> wire -> trainer, with nothing simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from aiohttp import web
from recipe_runs import SMALL, Shell, records
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_contracts import Group, SamplingParams, Trajectory, TrajectoryIdentity, wire
from miles_loop.audit import EngineRecords, RecordingEngine
from miles_loop.trainer_link import route_digests, turn_digest
from miles_qwen3.model import build_moe
from miles_rollout.engine.cli import bind, build
from miles_rollout.engine.config import EngineConfig
from miles_rollout.engine_client import EngineClient
from miles_rollout.generate.trajectories import single_generation
from miles_rollout.renderers import load_renderer
from miles_rollout.session import SessionConfig, SessionServer
from miles_trainer import Trainer, TrainerConfig

TURNS = 4


@asynccontextmanager
async def engine_on(model: Path, dtype: str = "auto") -> AsyncIterator[EngineClient]:
    """The embedded engine on a free port."""
    config = EngineConfig(model_path=model, port=0, weight_version="0", dtype=dtype)
    server = await asyncio.to_thread(build, config)
    runner = web.AppRunner(server.application(server.core), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    server.core.start()
    await web.SockSite(runner, listener).start()
    try:
        async with EngineClient("http://{}:{}".format(*listener.getsockname()[:2])) as client:
            yield client
    finally:
        await asyncio.to_thread(server.core.stop)
        await runner.cleanup()


async def episode(server: SessionServer, seed: int) -> Trajectory:
    """An agent of several turns; returns the session's only trajectory as the server gives it."""
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{server.url}/sessions") as response:
            session = (await response.json())["session_id"]
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"sort {seed}"}]
        for turn in range(TURNS):
            # a stop string that a random model soon says; a turn that ran into its limit could not be extended
            body = {"messages": messages, "seed": seed + turn, "max_tokens": 60, "stop": list("0123456789")}
            async with http.post(f"{server.session_url(session)}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"again {turn}"}]
        async with http.get(f"{server.url}/sessions/{session}/trajectories") as response:
            (found,) = wire.decode(await response.read(), list[Trajectory])
    return found


def chosen_by_the_model(model: Path, tokens: np.ndarray) -> np.ndarray:
    """Expert ids [tokens - 1, layers, top_k] of one plain forward pass, sorted."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    for name, module in plain.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with torch.inference_mode():
        plain(input_ids=torch.from_numpy(tokens[None, :-1].astype(np.int64)), use_cache=False)
    return torch.stack(seen, dim=1).sort(-1).values.numpy()


async def test_a_session_of_several_turns_is_replayed_as_it_was_sampled(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    build_moe(model, 0)
    records = EngineRecords()
    asked: list[tuple[int, int]] = []

    class Watched(RecordingEngine):
        async def generate(self, input_ids: Any, params: Any, **options: Any) -> Any:
            result = await super().generate(input_ids, params, **options)
            asked.append((options["routing_start"], len(result.routing)))
            return result

    async with engine_on(model) as client:
        settings = SessionConfig(record_routing=True, num_experts=8)
        async with SessionServer(Watched(client, records), load_renderer(model), settings) as server:
            made = [await episode(server, seed) for seed in (1, 50)]

    for trajectory in made:
        assert len(trajectory.turns) == TURNS
        assert trajectory.routing is not None
        assert trajectory.routing.num_tokens == trajectory.num_tokens - 1
        want = chosen_by_the_model(model, trajectory.token_ids)
        assert np.array_equal(np.sort(trajectory.routing.expert_ids, axis=-1), want)
    # every turn but the first asked for the rows of the tokens that no turn before had fed, and got no others
    assert sum(rows for _, rows in asked) == sum(t.num_tokens - 1 for t in made)
    assert [start for start, _ in asked[:TURNS]] == [0, *(t.end - 1 for t in made[0].turns[:-1])]

    members = tuple(
        t.replace(reward=float(i), identity=TrajectoryIdentity(prompt_index=0, member=i)) for i, t in enumerate(made)
    )
    group = Group(prompt_index=0, size=2, trajectories=members)
    (received,) = wire.decode(wire.encode([group]), list[Group])
    trainer = Trainer(model, TrainerConfig.model_validate({"optimizer": {"lr": 0.0}}), seed=0)
    metrics = trainer.train_step([received])
    assert metrics["replayed_fraction"] == 1.0
    assert metrics["router_agreement"] > 0.99  # both sides compute in float32
    assert metrics["train_rollout_logprob_abs_diff"] < 1e-4
    digests = [[turn_digest(t, turn.start, turn.end) for turn in t.turns] for t in received]
    report = records.audit([group], digests, route_digests([received]))
    assert (report.mismatches, report.route_mismatches) == (0, 0)
    assert report.routes_audited == sum(t.num_tokens - 1 for t in made)


async def test_a_bfloat16_engine_and_a_float32_trainer_agree_when_routes_are_replayed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=32,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    prompts = [list(range(3, 9 + i)) for i in range(24)]
    async with engine_on(tmp_path, "bfloat16") as client:
        params = [SamplingParams(max_new_tokens=40, seed=i, ignore_eos=True) for i in range(24)]
        names = [f"r{i}" for i in range(24)]
        said = await client.generate_batch(prompts, params, request_ids=names, routing=True)
    members = tuple(
        single_generation(
            identity=TrajectoryIdentity(prompt_index=0, member=i),
            prompt_ids=prompt,
            result=result,
            params=params[i],
            num_experts=32,
        ).replace(reward=float(i % 2))
        for i, (prompt, result) in enumerate(zip(prompts, said, strict=True))
    )
    group = Group(prompt_index=0, size=24, trajectories=members)
    settings = {"dtype": "float32", "optimizer": {"lr": 0.0}}
    on = Trainer(tmp_path, TrainerConfig.model_validate(settings), seed=0).train_step([group])
    settings["replay"] = {"enabled": False}
    off = Trainer(tmp_path, TrainerConfig.model_validate(settings), seed=0).train_step([group])
    assert 0.9 < on["router_agreement"] < 1.0
    assert on["train_rollout_kl"] < 0.1 * off["train_rollout_kl"]
    assert on["train_rollout_logprob_abs_diff"] < 0.7 * off["train_rollout_logprob_abs_diff"]


def test_an_agents_run_audits_its_routes(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "guess", "--model", "moe", "--steps", 2)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    for record in records(run)[1:]:
        assert record["rollout/route_mismatches"] == 0
        assert record["train/replayed_fraction"] == 1.0
        assert record["train/routing_packed_bytes"] < record["train/routing_bytes"]
        assert record["perf/replay_s"] > 0
    # rollout runs ahead: all of a step's answers may have been sampled before the step before it ended
    assert sum(record["perf/routing_capture_s"] for record in records(run)[1:]) > 0
    report = shell.run_json("miles", "report", run, "--json")
    assert report["route_mismatches"] == 0
    assert report["routes_audited"] > report["tokens_trained"]
