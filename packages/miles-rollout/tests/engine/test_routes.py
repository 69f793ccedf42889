"""Routed experts: one row for every fed token, equal to what the model's routers choose, wherever the KV came from."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driving import finish_all, make_core, request
from engine_models import make_model
from engine_serving import until
from engine_weights import plan_update, write_buckets

from miles_contracts import EngineError, PauseMode, RoutingTrace, SamplingParams, wire
from miles_rollout.engine.sequence import Sampling, Sequence
from miles_rollout.engine.server import EngineServer

FAMILIES = [
    "qwen3_moe",
    "glm4_moe",
    "glm_moe_dsa",
    "deepseek_v3",
    "deepseek_v32",
    "gpt_oss",
    "minimax_m2",
    "qwen3_next",
]
PROMPT = list(range(3, 33))


def routers_choices(model: Any, tokens: list[int]) -> np.ndarray:
    """Expert ids [tokens - 1, layers, top_k] that a plain forward pass hands to its expert modules."""
    seen: list[torch.Tensor] = []
    hooks = [
        m.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(
                next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.dtype == torch.int64)
            ),
            with_kwargs=True,
        )
        for name, m in model.named_modules()
        if name.endswith(".experts")
    ]
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).numpy()


def agreement(left: np.ndarray, right: np.ndarray) -> float:
    """Share of (token, layer) with the same set of experts."""
    return float((np.sort(left, axis=-1) == np.sort(right, axis=-1)).all(axis=-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_the_routers_choices(models, family: str) -> None:
    core = make_core(models(family), chunked_prefill_size=8)
    sequences = [request(PROMPT[: 10 + 4 * i], 12, str(i), seed=i) for i in range(5)]
    finish_all(core, sequences)
    model = make_model(family)
    for sequence in sequences:
        tokens = sequence.known.tolist()
        assert sequence.routes is not None
        assert sequence.routed == len(tokens) - 1
        want = routers_choices(model, tokens)
        assert agreement(sequence.routes[: sequence.routed], want) == 1.0


def test_rows_survive_the_prefix_cache_and_retraction(models) -> None:
    model = make_model("qwen3_moe")
    core = make_core(models("qwen3_moe"), max_total_tokens=150, chunked_prefill_size=16)
    crowd = [request([*PROMPT, i + 40], 20, str(i), seed=i) for i in range(8)]
    finish_all(core, crowd)
    assert core.scheduler.retracted > 0
    warm = request([*crowd[0].known.tolist(), 5], 6, "turn 2", seed=9)
    finish_all(core, [warm])
    assert warm.cached is not None
    for sequence in [*crowd, warm]:
        assert sequence.routes is not None
        assert sequence.routed == sequence.length - 1
        assert agreement(sequence.routes[: sequence.routed], routers_choices(model, sequence.known.tolist())) == 1.0


async def test_both_wire_forms_say_the_same(models, serve) -> None:
    engine = await serve(models("qwen3_moe"))
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    ask = {"input_ids": PROMPT, "sampling_params": params, "return_routed_experts": True}
    _, sglang = await engine.post("/generate", ask)
    flat = np.frombuffer(base64.b64decode(sglang["meta_info"]["routed_experts"]), dtype="<i4")
    _, narrow = await engine.post("/generate", {**ask, "routed_experts_format": "narrow"})
    packed = narrow["meta_info"]["routed_experts_packed"]
    assert packed["dtype"] == "|u1"
    assert packed["shape"] == [35, 3, 2]
    ids = np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"]).reshape(packed["shape"])
    assert np.array_equal(flat.reshape(35, 3, 2), ids)
    result = await engine.client.generate(PROMPT, SamplingParams(max_new_tokens=6, temperature=0.0), routing=True)
    trace = RoutingTrace.of(np.asarray(result.routing), num_experts=8)
    assert trace.num_tokens == len(PROMPT) + len(result.output_ids) - 1
    _, plain = await engine.post("/generate", {**ask, "return_routed_experts": False})
    assert "routed_experts" not in plain["meta_info"]


async def test_a_dense_engine_refuses_to_route(models, serve) -> None:
    engine = await serve(models("qwen3"))
    with pytest.raises(EngineError, match="no mixture-of-experts layers"):
        await engine.client.generate(PROMPT, SamplingParams(max_new_tokens=2), routing=True)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_rows_stay_with_the_pass_that_sampled(models, serve, tmp_path: Path, mode: PauseMode) -> None:
    """After an update, tokens fed before keep the rows of the old weights, also when retraction feeds them again."""
    engine = await serve(models("qwen3_moe", 0))
    params = SamplingParams(max_new_tokens=150, ignore_eos=True, seed=1)
    task = asyncio.create_task(engine.client.generate(PROMPT, params, routing=True))
    await until(lambda: engine.core.sampled_tokens >= 40)
    await engine.client.pause(mode)
    update = plan_update(models("qwen3_moe", 1), 1)
    await engine.client.begin_weight_update("u", update.manifest)
    for bucket in write_buckets(update, tmp_path, "u", bucket_bytes=1 << 20):
        await engine.client.load_bucket(bucket)
    await engine.client.commit_weight_update("u")
    await engine.client.resume()
    result = await task
    assert result.routing.shape == (len(PROMPT) + 149, 3, 2)
    tokens = [*PROMPT, *result.output_ids.tolist()]
    # The last token sampled by the old weights was not fed before the update.
    old_rows = len(PROMPT) + result.version_spans[0].end - 1
    old = routers_choices(make_model("qwen3_moe", 0), tokens)
    new = routers_choices(make_model("qwen3_moe", 1), tokens)
    assert agreement(result.routing[:old_rows], old[:old_rows]) == 1.0
    assert agreement(result.routing[:old_rows], new[:old_rows]) < 0.9
    if mode is PauseMode.RETRACT:
        assert agreement(result.routing[old_rows:], new[old_rows:]) == 1.0
    # Who comes later and finds the prompt in the cache gets the rows of the weights that filled the cache.
    later = await engine.client.generate([*PROMPT, 7], SamplingParams(max_new_tokens=2), routing=True)
    assert (later.cached_tokens or 0) >= (len(PROMPT) if mode is PauseMode.RETRACT else 0)
    fresh = routers_choices(make_model("qwen3_moe", 1), [*PROMPT, 7, *later.output_ids.tolist()])
    assert agreement(later.routing, fresh) == 1.0


async def test_only_the_rows_that_are_asked_for(models, serve) -> None:
    """A session's later turns ask from the last token that was not fed before; the prefix cache gives the rest."""
    engine = await serve(models("qwen3_moe"))
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    whole = await engine.client.generate(PROMPT, params, routing=True)
    for start in (0, 1, len(PROMPT) - 1, len(PROMPT)):
        part = await engine.client.generate(PROMPT, params, routing=True, routing_start=start)
        assert np.array_equal(part.routing, whole.routing[start:])
    turn = [*PROMPT, *whole.output_ids.tolist(), 40, 41]
    start = len(whole.routing)
    rest = await engine.client.generate(turn, params, routing=True, routing_start=start)
    tokens = [*turn, *rest.output_ids.tolist()]
    joined = np.concatenate([whole.routing, rest.routing])
    assert agreement(joined, routers_choices(make_model("qwen3_moe"), tokens)) == 1.0
    # nothing new at all: the prompt is computed, no token is sampled
    nothing = await engine.client.generate(PROMPT, SamplingParams(max_new_tokens=1), routing=True, routing_start=30)
    assert len(nothing.routing) == 0


async def test_a_batch_has_one_start_for_each_prompt(models, serve) -> None:
    engine = await serve(models("qwen3_moe"))
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    prompts, starts = [PROMPT, PROMPT[:9], PROMPT[:20]], [29, 4, 0]
    together = await engine.client.generate_batch(
        prompts, [params] * 3, request_ids=["a", "b", "c"], routing=True, routing_starts=starts
    )
    for prompt, start, result in zip(prompts, starts, together, strict=True):
        alone = await engine.client.generate(prompt, params, routing=True, routing_start=start)
        assert np.array_equal(result.routing, alone.routing)
        assert len(result.routing) == len(prompt) + 3 - start


async def test_streams_end_with_the_rows_that_are_asked_for(models, serve) -> None:
    engine = await serve(models("qwen3_moe"))
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    whole = await engine.client.generate(PROMPT, params, routing=True)
    *_, last = [r async for r in engine.client.generate_stream(PROMPT, params, routing=True, routing_start=20)]
    assert np.array_equal(last.routing, whole.routing[20:])


async def test_a_stream_that_looks_late_finds_the_end_and_its_routes(models, serve, monkeypatch) -> None:
    """Told that a sequence grew, the server sees it only when it has finished: that event must be whole."""
    engine = await serve(models("qwen3_moe"))
    plain = EngineServer.on_model

    async def late(self: EngineServer, action: Any) -> Any:
        result = await plain(self, action)
        if result is None:  # the submission
            return None
        await until(lambda: not engine.core.state()["running_requests"])
        return await plain(self, action)

    monkeypatch.setattr(EngineServer, "on_model", late)
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    *_, last = [r async for r in engine.client.generate_stream(PROMPT, params, routing=True)]
    assert len(last.routing) == len(PROMPT) + 5


async def test_the_binary_answer_is_a_frame_with_packed_routes(models, serve) -> None:
    engine = await serve(models("qwen3_moe"))
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    _, plain = await engine.post("/generate", body)
    async with engine.http.post(engine.url + "/generate", json={**body, "routed_experts_format": "bits"}) as response:
        assert response.content_type == wire.CONTENT_TYPE
        frame = wire.decode(await response.read(), dict)
    trace = frame["meta_info"].pop("routed_experts_trace")
    flat = np.frombuffer(base64.b64decode(plain["meta_info"].pop("routed_experts")), dtype="<i4")
    assert np.array_equal(trace.expert_ids, flat.reshape(35, 3, 2))
    assert trace.num_experts == 8
    for answer in (frame, plain):
        answer["meta_info"].pop("id")
        assert answer["meta_info"].pop("routed_experts_s") > 0
        answer["meta_info"].pop("cached_tokens")
        answer["meta_info"]["output_token_logprobs"] = [t[1] for t in answer["meta_info"]["output_token_logprobs"]]
    assert frame == plain


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"routed_experts_start_len": 31}, "routed_experts_start_len"),
        ({"routed_experts_start_len": 1.5}, "routed_experts_start_len"),
        ({"routed_experts_format": "gzip"}, "routed_experts_format"),
        ({"routed_experts_format": "bits", "stream": True}, "routed_experts_format"),
        ({"input_ids": [PROMPT, PROMPT], "stream": True, "routed_experts_format": "narrow"}, "return_routed_experts"),
    ],
)
async def test_bad_routing_fields_are_refused(models, serve, fields: dict[str, Any], field: str) -> None:
    engine = await serve(models("qwen3_moe"))
    status, answer = await engine.post("/generate", {"input_ids": PROMPT, "return_routed_experts": True, **fields})
    assert (status, answer["field"]) == (400, field)


def test_rows_behind_a_gap_are_not_kept() -> None:
    """Rather fewer rows, which everybody refuses, than rows of other tokens."""
    sequence = Sequence(
        id="a", tokens=np.arange(20, dtype=np.int32), prompt_length=12, sampling=Sampling(max_new_tokens=8, seed=0)
    )
    rows = np.arange(12, dtype=np.uint8).reshape(12, 1, 1)
    sequence.record_routes(3, rows[3:6])
    assert (sequence.routed, sequence.rows_to_share(3)) == (0, None)
    sequence.record_routes(0, rows[:5])
    sequence.record_routes(3, rows[3:9])
    sequence.record_routes(10, rows[10:])
    assert sequence.routed == 9
    assert sequence.routes is not None
    assert np.array_equal(sequence.routes[:9], rows[:9])
