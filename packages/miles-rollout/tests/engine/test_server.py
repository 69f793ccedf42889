"""The HTTP boundary: answers in SGLang's form, refusals that name the field, aborts, pauses, versions, caches."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from engine_models import VOCAB
from engine_serving import until
from engine_text import save_tokenizer

from miles_contracts import GenerateResult, PauseMode, SamplingParams

PROMPT = [5, 6, 7, 8, 9]


def body(**fields: object) -> dict[str, object]:
    params = {"max_new_tokens": 6, "temperature": 0.0, **dict(fields.pop("sampling_params", {}))}  # type: ignore[call-overload]
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **fields}


async def test_generate_has_sglangs_form(models, serve) -> None:
    engine = await serve(models("qwen3"), weight_version="3")
    status, answer = await engine.post("/generate", body(rid="mine"))
    assert status == 200
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 6, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_version"] == "3"
    assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 6}]
    assert [t[1] for t in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(len(t) == 3 and t[0] <= 0 and t[2] is None for t in meta["output_token_logprobs"])


async def test_batches_keep_their_order_and_their_own_parameters(models, serve) -> None:
    engine = await serve(models("qwen3"))
    prompts = [[3, 4], [9, 9, 9], [40]]
    params = [{"max_new_tokens": n, "temperature": 0.0} for n in (2, 5, 3)]
    _, together = await engine.post(
        "/generate", {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    )
    assert [a["meta_info"]["completion_tokens"] for a in together] == [2, 5, 3]
    for prompt, param, answer in zip(prompts, params, together, strict=True):
        _, alone = await engine.post("/generate", {"input_ids": prompt, "sampling_params": param})
        assert alone["output_ids"] == answer["output_ids"]


async def test_prompt_logprobs_start_where_asked(models, serve) -> None:
    engine = await serve(models("qwen3"))
    _, answer = await engine.post("/generate", body(logprob_start_len=0))
    listed = answer["meta_info"]["input_token_logprobs"]
    assert [t[1] for t in listed] == PROMPT
    assert listed[0][0] is None
    _, later = await engine.post("/generate", body(logprob_start_len=3, sampling_params={"max_new_tokens": 0}))
    assert later["output_ids"] == []
    assert [t[1] for t in later["meta_info"]["input_token_logprobs"]] == PROMPT[3:]
    np.testing.assert_allclose(
        [t[0] for t in later["meta_info"]["input_token_logprobs"]], [t[0] for t in listed[3:]], atol=1e-5
    )


async def test_stop_tokens_end_tokens_and_ignoring_them(models, serve) -> None:
    engine = await serve(models("qwen3"))
    _, free = await engine.post("/generate", body(sampling_params={"max_new_tokens": 12, "ignore_eos": True}))
    ids = free["output_ids"]
    third = ids[2]
    stop = {"max_new_tokens": 12, "stop_token_ids": [third]}
    _, stopped = await engine.post("/generate", body(sampling_params=stop))
    _, ignored = await engine.post("/generate", body(sampling_params={**stop, "ignore_eos": True}))
    assert ignored["output_ids"] == ids
    end = ids.index(third) + 1
    assert stopped["output_ids"] == ids[:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}


async def test_end_token_of_the_generation_config(models, serve, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models("qwen3"), folder)
    probe = await serve(folder)
    _, free = await probe.post("/generate", body(sampling_params={"max_new_tokens": 10, "ignore_eos": True}))
    eos = free["output_ids"][4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, VOCAB - 1]}))
    engine = await serve(folder)
    _, stopped = await engine.post("/generate", body(sampling_params={"max_new_tokens": 10}))
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    _, ignored = await engine.post("/generate", body(sampling_params={"max_new_tokens": 10, "ignore_eos": True}))
    assert ignored["output_ids"] == free["output_ids"]


async def test_text_in_text_out_and_stop_strings(models, serve, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models("qwen3"), folder)
    tokenizer = save_tokenizer(folder, VOCAB)
    engine = await serve(folder)
    sampling = {"max_new_tokens": 30, "temperature": 1.0, "sampling_seed": 4, "ignore_eos": True}
    _, free = await engine.post("/generate", {"text": "w5 w6 w7", "sampling_params": sampling})
    assert free["meta_info"]["prompt_tokens"] == 3
    words = tokenizer.decode(free["output_ids"])
    assert free["text"] == words
    stop = " ".join(words.split()[4:6])
    _, cut = await engine.post("/generate", {"text": "w5 w6 w7", "sampling_params": {**sampling, "stop": stop}})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["text"] == words[: words.index(stop)]
    assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]
    kept = {**sampling, "stop": ["never", stop], "no_stop_trim": True}
    _, whole = await engine.post("/generate", {"text": "w5 w6 w7", "sampling_params": kept})
    assert whole["text"] == words[: words.index(stop) + len(stop)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"input_ids": "no"}, "input_ids"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1] * 256}, "input_ids"),
        ({"text": "also"}, "input_ids"),
        ({"input_ids": None, "text": "no tokenizer"}, "text"),
        ({"samplng_params": {}}, "samplng_params"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": True}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_p": 1.5}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
        ({"sampling_params": {"min_p": -0.1}}, "sampling_params.min_p"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"sampling_seed": -3}}, "sampling_params.sampling_seed"),
        ({"sampling_params": {"stop": "x"}}, "sampling_params.stop"),
        ({"sampling_params": {"stop_token_ids": [VOCAB]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"repetition_penalty": 1.2}}, "sampling_params.repetition_penalty"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"model": "another"}, "model"),
        ({"sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"top_logprobs_num": 5}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"rid": 7}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid"),
    ],
)
async def test_refusals_name_the_field(shared_engine, fields: dict[str, object], named: str) -> None:
    sampling = fields.pop("sampling_params", {})
    request = {k: v for k, v in {**body(), **fields}.items() if v is not None}
    request["sampling_params"] = sampling
    status, answer = await shared_engine.post("/generate", request)
    assert status == 400
    assert answer["field"] == named
    assert named in answer["message"]
    assert (await shared_engine.get("/health"))[0] == 200


async def test_a_misspelt_parameter_gets_a_suggestion(shared_engine) -> None:
    _, answer = await shared_engine.post("/generate", body(sampling_params={"temprature": 1}))
    assert "did you mean temperature?" in answer["message"]


async def test_bad_bodies_and_unknown_calls(shared_engine) -> None:
    async with shared_engine.http.post(shared_engine.url + "/generate", data=b"{nope") as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["message"]
    status, answer = await shared_engine.post("/generate", [1, 2])
    assert (status, answer["field"]) == (400, "body")
    status, answer = await shared_engine.post("/no_such_call", {})
    assert status == 404
    assert "unknown call" in answer["message"]


async def test_facts(models, serve) -> None:
    engine = await serve(models("qwen3"), weight_version="12")
    for path in ("/get_weight_version", "/weight_version", "/model_info", "/get_model_info", "/get_server_info"):
        status, answer = await engine.get(path)
        assert status == 200
        assert answer["weight_version"] == "12"
    _, info = await engine.get("/server_info")
    assert info["attention"] == "slots"
    assert info["probe_error"] < 1e-5
    assert await engine.client.weight_version() == 12
    assert (await engine.get("/health_generate"))[0] == 200
    assert await engine.client.healthy()


async def test_siblings_and_turns_are_cached_exactly(models, serve) -> None:
    engine = await serve(models("qwen3"))
    prompt = list(range(2, 60))
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    group = await asyncio.gather(*(engine.client.generate(prompt, params) for _ in range(6)))
    assert sorted(g.cached_tokens for g in group) == [0] + [57] * 5
    assert len({tuple(g.output_ids.tolist()) for g in group}) > 1
    turn = [*prompt, *group[0].output_ids.tolist(), 7, 8]
    again = await engine.client.generate(turn, params)
    # The last sampled token was never fed, so its keys are not there.
    assert again.cached_tokens == 58 + 4
    await engine.client.flush_cache()
    assert (await engine.client.generate(turn, params)).cached_tokens == 0


async def test_seeds(models, serve) -> None:
    engine = await serve(models("qwen3"))
    seeded = SamplingParams(max_new_tokens=20, seed=5, ignore_eos=True)
    free = SamplingParams(max_new_tokens=20, ignore_eos=True)
    results = await asyncio.gather(*(engine.client.generate(PROMPT, p) for p in (seeded, free, seeded, free, free)))
    outputs = [tuple(r.output_ids.tolist()) for r in results]
    assert outputs[0] == outputs[2]
    assert len(set(outputs)) == 4


async def test_abort_returns_what_was_sampled(models, serve) -> None:
    engine = await serve(models("qwen3"))
    params = SamplingParams(max_new_tokens=240, ignore_eos=True, temperature=0.0)
    await engine.client.pause(PauseMode.IN_PLACE)
    running = asyncio.create_task(engine.client.generate(PROMPT, params, request_id="a"))
    other = asyncio.create_task(engine.client.generate(PROMPT, params, request_id="b"))
    await waiting(engine, 2)
    await engine.client.resume()
    await sampled(engine, 20)
    await engine.client.pause(PauseMode.IN_PLACE)
    await engine.client.abort("a")
    partial = await asyncio.wait_for(running, 20)
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.output_ids) < 240
    assert len(partial.logprobs) == len(partial.output_ids)
    await engine.client.resume()
    whole = await asyncio.wait_for(other, 20)
    assert whole.finish_reason == "length"
    assert whole.output_ids[: len(partial.output_ids)].tolist() == partial.output_ids.tolist()
    await engine.client.abort("not there")  # harmless


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_pause_and_resume(models, serve, mode: PauseMode) -> None:
    engine = await serve(models("qwen3"))
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=0.0)
    want = await engine.client.generate(PROMPT, params)
    running = asyncio.create_task(engine.client.generate(PROMPT, params))
    await sampled(engine, 230)
    await engine.client.pause(mode)
    count = engine.core.sampled_tokens
    late = asyncio.create_task(engine.client.generate([9, 9], params))
    await waiting(engine, 1 if mode is not PauseMode.RETRACT else 2)
    assert engine.core.sampled_tokens == count
    if mode is PauseMode.ABORT:
        got = await asyncio.wait_for(running, 20)
        assert got.finish_reason == "abort"
        assert want.output_ids[: len(got.output_ids)].tolist() == got.output_ids.tolist()
    await engine.client.resume()
    if mode is not PauseMode.ABORT:
        got = await asyncio.wait_for(running, 20)
        assert got.output_ids.tolist() == want.output_ids.tolist()
    assert (await asyncio.wait_for(late, 20)).finish_reason == "length"


async def test_a_caller_who_leaves_frees_the_engine(models, serve) -> None:
    engine = await serve(models("qwen3"))
    params = SamplingParams(max_new_tokens=240, ignore_eos=True)
    await engine.client.pause(PauseMode.IN_PLACE)
    task = asyncio.create_task(engine.client.generate(PROMPT, params))
    await waiting(engine, 1)
    task.cancel()
    await waiting(engine, 0)
    await engine.client.resume()


async def test_streaming(models, serve) -> None:
    engine = await serve(models("qwen3"))
    _, want = await engine.post("/generate", body())
    seen: list[dict[str, object]] = []
    async with engine.http.post(engine.url + "/generate", json=body(stream=True)) as response:
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    seen = [json.loads(line) for line in lines[:-1]]
    assert seen[-1]["output_ids"] == want["output_ids"]
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "length"
    lengths = [len(s["output_ids"]) for s in seen]
    assert lengths == sorted(lengths)
    assert all(s["output_ids"] == want["output_ids"][:n] for s, n in zip(seen, lengths, strict=True))


async def test_a_long_stream_does_not_repeat_itself_for_every_token(models, serve) -> None:
    engine = await serve(models("qwen3"))
    ask = body(stream=True, sampling_params={"max_new_tokens": 240, "ignore_eos": True})
    async with engine.http.post(engine.url + "/generate", json=ask) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    counts = [len(json.loads(line.removeprefix(b"data: "))["output_ids"]) for line in lines]
    assert counts[-1] == 240
    assert len(counts) > 3
    assert all(b - a >= max(1, a // 64) for a, b in itertools.pairwise(counts[:-1]))


async def test_a_streaming_client_sees_the_answer_grow_and_gets_what_others_get(models, serve) -> None:
    engine = await serve(models("qwen3"))
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    want = await engine.client.generate(PROMPT, params)
    *partial, last = [r async for r in engine.client.generate_stream(PROMPT, params, request_id="s")]
    assert isinstance(last, GenerateResult)
    assert last.output_ids.tolist() == want.output_ids.tolist()
    np.testing.assert_allclose(last.logprobs, want.logprobs, atol=1e-5)
    assert partial
    assert all(p.output_ids.tolist() == want.output_ids[: len(p.output_ids)].tolist() for p in partial)


async def test_a_stream_of_several_prompts_gives_each_when_it_has_finished(models, serve) -> None:
    engine = await serve(models("qwen3"))
    prompts, lengths = [[3, 4], [9, 9, 9], [40]], (30, 2, 9)
    params = [SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    want = await engine.client.generate_batch(prompts, params, request_ids=["a", "b", "c"])
    got = [item async for item in engine.client.generate_each(prompts, params, request_ids=["a", "b", "c"])]
    assert [index for index, _ in got] == [1, 2, 0]
    for index, result in got:
        assert result.output_ids.tolist() == want[index].output_ids.tolist()
        np.testing.assert_allclose(result.logprobs, want[index].logprobs, atol=1e-5)
        assert result.request_id == "abc"[index]
    assert not engine.core._by_id


async def test_an_aborted_prompt_leaves_the_rest_of_its_stream(models, serve) -> None:
    engine = await serve(models("qwen3"))
    limit = engine.core.scheduler.limits.context_length - len(PROMPT) - 1
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (limit, 8, limit)]
    finished = []
    async with aclosing(engine.client.generate_each([PROMPT] * 3, params, request_ids=["a", "b", "c"])) as answers:
        async for index, result in answers:
            finished.append((index, result.finish_reason))
            if index == 1:
                await engine.client.abort("a")
            else:
                break  # hang up: "c" is aborted too
    assert finished == [(1, "length"), (0, "abort")]
    await until(lambda: not engine.core.scheduler.running)


async def test_hanging_up_on_a_stream_aborts_it(models, serve) -> None:
    engine = await serve(models("qwen3"))
    limit = engine.core.scheduler.limits.context_length - len(PROMPT) - 1
    params = SamplingParams(max_new_tokens=limit, ignore_eos=True)
    async with aclosing(engine.client.generate_stream(PROMPT, params)) as stream:
        await anext(stream)
    await until(lambda: not engine.core.scheduler.running)


async def test_a_failing_step_fails_its_requests_and_shows_in_health(models, serve, monkeypatch) -> None:
    engine = await serve(models("qwen3"))

    def broken(_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core._executor, "run", broken)
        _, answer = await engine.post("/generate", body())
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert "out of memory" in answer["meta_info"]["finish_reason"]["message"]
        assert (await engine.get("/health"))[0] == 503
        assert not await engine.client.healthy()
    assert (await engine.get("/health_generate"))[0] == 200
    assert await engine.client.healthy()
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    assert (await engine.client.generate(PROMPT, params)).finish_reason == "length"


async def test_logits_that_are_not_finite_end_the_request(models, serve) -> None:
    import torch

    engine = await serve(models("qwen3"))
    with torch.no_grad():
        engine.core.loaded.model.model.norm.weight[0] = float("nan")
    _, answer = await engine.post("/generate", body())
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "the model's logits are not finite"}
    assert answer["output_ids"] == []


async def test_new_tokens_are_cut_to_the_context(models, serve) -> None:
    engine = await serve(models("qwen3"), context_length=20)
    _, answer = await engine.post("/generate", body(sampling_params={"max_new_tokens": 500, "ignore_eos": True}))
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 15}
    status, answer = await engine.post("/generate", body(input_ids=[3] * 20))
    assert status == 400
    assert "use at most 19" in answer["message"]


async def waiting(engine, count: int) -> None:
    """Until `count` requests wait in the queue."""
    await until(lambda: len(engine.core.scheduler.waiting) == count)


async def sampled(engine, count: int) -> None:
    """Until the engine has sampled `count` tokens."""
    await until(lambda: engine.core.sampled_tokens >= count)
