"""A weight update is all or nothing, exact, and visible in the versions of the tokens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_models import make_model
from engine_serving import until
from engine_weights import Update, plan_update, spec_of, write_buckets

from miles_contracts import EngineError, PauseMode, SamplingParams, ShmBucket, TensorSpec, VersionSpan, WeightManifest
from miles_rollout.engine.weight_layout import WeightLayout

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def send(engine, update: Update, directory: Path, update_id: str = "u", bucket_bytes: int = 4096) -> None:
    """Everything but the commit."""
    await engine.client.begin_weight_update(update_id, update.manifest)
    for bucket in write_buckets(update, directory, update_id, bucket_bytes=bucket_bytes):
        await engine.client.load_bucket(bucket)


async def assert_serves_old(engine, before) -> None:
    after = await engine.client.generate(PROMPT, GREEDY)
    assert after.output_ids.tolist() == before.output_ids.tolist()
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=2e-6)
    assert await engine.client.weight_version() == 0


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
async def test_update_equals_a_model_with_those_weights(models, serve, family: str, tmp_path: Path) -> None:
    old, new = await serve(models(family, 0)), await serve(models(family, 1))
    before = await old.client.generate(PROMPT, GREEDY)
    want = await new.client.generate(PROMPT, GREEDY)
    assert not np.array_equal(before.output_ids, want.output_ids)
    await send(old, plan_update(models(family, 1), version=7), tmp_path)
    await assert_serves_old(old, before)
    await old.client.commit_weight_update("u")
    got = await old.client.generate(PROMPT, GREEDY)
    assert got.output_ids.tolist() == want.output_ids.tolist()
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert got.version_spans == (VersionSpan(start=0, end=8, version=7),)
    assert got.cached_tokens == 0
    assert await old.client.weight_version() == 7
    _, mine = await old.post("/weights_checker", {"action": "checksum"})
    _, theirs = await new.post("/weights_checker", {"action": "checksum"})
    assert mine["tensors"] == theirs["tensors"]


async def test_versions_take_turns_in_memory_and_a_failed_update_spoils_none_of_it(
    models, serve, tmp_path: Path
) -> None:
    engine = await serve(models("qwen3_moe", 0))
    layout = engine.core.updates.layout
    places = []
    for version in range(1, 7):
        update = plan_update(models("qwen3_moe", version % 2), version)
        await send(engine, update, tmp_path, f"u{version}")
        await engine.client.commit_weight_update(f"u{version}")
        places.append({name: tensor.data_ptr() for name, tensor in layout.tensors.items()})
        if version == 4:
            other = plan_update(models("qwen3_moe", 1), 5)
            before = await engine.client.generate(PROMPT, GREEDY)
            await send(engine, other, tmp_path, "failed")
            await engine.client.rollback_weight_update("failed")
            after = await engine.client.generate(PROMPT, GREEDY)
            assert after.output_ids.tolist() == before.output_ids.tolist()
            np.testing.assert_allclose(after.logprobs, before.logprobs, atol=2e-6)
        _, checks = await engine.post("/weights_checker", {"action": "checksum"})
        for entry in checks["tensors"]:
            assert entry["digest"] == spec_of(entry["name"], update.tensors[entry["name"]]).digest
    assert places[0] == places[2]
    assert places[1] == places[3]
    assert not set(places[0].values()) & set(places[1].values())


async def test_several_updates_and_a_repeated_commit(models, serve, tmp_path: Path) -> None:
    engine = await serve(models("qwen3", 0))
    for version, seed in ((1, 1), (2, 2), (3, 0)):
        await send(engine, plan_update(models("qwen3", seed), version), tmp_path, f"u{version}")
        await engine.client.commit_weight_update(f"u{version}")
        await engine.client.commit_weight_update(f"u{version}")  # the answer may have been lost
        assert await engine.client.weight_version() == version
    fresh = await serve(models("qwen3", 0))
    assert np.array_equal(
        (await engine.client.generate(PROMPT, GREEDY)).output_ids,
        (await fresh.client.generate(PROMPT, GREEDY)).output_ids,
    )


async def test_rollback_leaves_the_old_weights(models, serve, tmp_path: Path) -> None:
    engine = await serve(models("qwen3"))
    before = await engine.client.generate(PROMPT, GREEDY)
    await send(engine, plan_update(models("qwen3", 1), 1), tmp_path)
    await engine.client.rollback_weight_update("u")
    await engine.client.rollback_weight_update("u")
    await engine.client.rollback_weight_update("never begun")
    await assert_serves_old(engine, before)
    with pytest.raises(EngineError, match="not open"):
        await engine.client.commit_weight_update("u")
    await send(engine, plan_update(models("qwen3", 1), 1), tmp_path, "again")
    await engine.client.commit_weight_update("again")
    with pytest.raises(EngineError, match="cannot be rolled back"):
        await engine.client.rollback_weight_update("again")


def changed(manifest: WeightManifest, index: int, **fields: object) -> WeightManifest:
    tensors = list(manifest.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **fields)
    return WeightManifest(version=manifest.version, tensors=tuple(sorted(tensors, key=lambda t: t.name)))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: changed(m, 3, shape=(1, 2)), "shape"),
        (lambda m: changed(m, 3, dtype="int32"), "dtype"),
        (lambda m: changed(m, 3, name="model.surprise"), "no such tensor"),
        (lambda m: WeightManifest(version=1, tensors=m.tensors[1:]), "are not in the update"),
        (
            lambda m: WeightManifest(
                version=1, tensors=(TensorSpec(name="lm_head.weight", dtype="float32", shape=(128, 32)), *m.tensors)
            ),
            "tied to",
        ),
    ],
)
async def test_a_manifest_of_another_model_is_refused(models, serve, spoil, reason: str) -> None:
    engine = await serve(models("qwen3"))
    before = await engine.client.generate(PROMPT, GREEDY)
    with pytest.raises(EngineError, match=reason) as caught:
        await engine.client.begin_weight_update("u", spoil(plan_update(models("qwen3", 1), 1).manifest))
    assert caught.value.status == 400
    await assert_serves_old(engine, before)


def flip_a_byte(bucket: ShmBucket) -> ShmBucket:
    with open(bucket.path, "r+b") as file:
        file.seek(bucket.tensors[-1].offset + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return bucket


def cut_the_file(bucket: ShmBucket) -> ShmBucket:
    os.truncate(bucket.path, bucket.num_bytes - 1)
    return bucket


def edit(bucket: ShmBucket, **fields: object) -> ShmBucket:
    tensor = bucket.tensors[-1]
    return msgspec.structs.replace(
        bucket,
        tensors=(
            *bucket.tensors[:-1],
            msgspec.structs.replace(tensor, spec=msgspec.structs.replace(tensor.spec, **fields)),
        ),
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (flip_a_byte, "digest"),
        (cut_the_file, "ends after"),
        (lambda b: edit(b, digest=None), "without a digest"),
        (lambda b: edit(b, name="model.surprise"), "not in the manifest"),
        (lambda b: msgspec.structs.replace(b, path=b.path + ".gone"), "No such file"),
        (lambda b: msgspec.structs.replace(b, num_bytes=8), "outside the bucket"),
        (lambda b: msgspec.structs.replace(b, update_id="another"), "not open"),
    ],
)
async def test_a_bad_bucket_ends_the_update(models, serve, tmp_path: Path, spoil, reason: str) -> None:
    engine = await serve(models("qwen3"))
    before = await engine.client.generate(PROMPT, GREEDY)
    update = plan_update(models("qwen3", 1), 1)
    await engine.client.begin_weight_update("u", update.manifest)
    buckets = list(write_buckets(update, tmp_path, "u", bucket_bytes=1 << 20))
    with pytest.raises(EngineError, match=reason) as caught:
        await engine.client.load_bucket(spoil(buckets[0]))
    assert caught.value.status == 400
    with pytest.raises(EngineError):
        await engine.client.commit_weight_update("u")
    await assert_serves_old(engine, before)


async def test_overlapping_and_missing_pieces(models, serve, tmp_path: Path) -> None:
    engine = await serve(models("qwen3"))
    update = plan_update(models("qwen3", 1), 1)
    buckets = [b for b in write_buckets(update, tmp_path, "u", bucket_bytes=512) if b.part_of is not None]
    await engine.client.begin_weight_update("u", update.manifest)
    await engine.client.load_bucket(buckets[0])
    await engine.client.load_bucket(buckets[0])  # the same piece twice is a repeat, not a fault
    with pytest.raises(EngineError, match="overlaps"):
        await engine.client.load_bucket(msgspec.structs.replace(buckets[1], part_start=8))
    await engine.client.begin_weight_update("v", update.manifest)
    for bucket in list(write_buckets(update, tmp_path, "v", bucket_bytes=512))[:-1]:
        await engine.client.load_bucket(bucket)
    with pytest.raises(EngineError, match="never arrived"):
        await engine.client.commit_weight_update("v")


async def test_one_update_at_a_time(models, serve) -> None:
    engine = await serve(models("qwen3"))
    await engine.client.begin_weight_update("u", plan_update(models("qwen3", 1), 1).manifest)
    with pytest.raises(EngineError, match="'u' is open"):
        await engine.client.load_from_disk(models("qwen3", 1), 1)


async def test_an_update_is_begun_once_however_often_it_is_asked_for(models, serve, tmp_path: Path) -> None:
    engine, update = await serve(models("qwen3")), plan_update(models("qwen3", 1), 1)
    await send(engine, update, tmp_path)
    await engine.client.begin_weight_update("u", update.manifest)
    await engine.client.commit_weight_update("u")
    assert await engine.client.weight_version() == 1


async def test_an_update_whose_driver_has_died_is_forgotten_when_the_next_one_begins(
    models, serve, tmp_path: Path
) -> None:
    engine, update = await serve(models("qwen3")), plan_update(models("qwen3", 1), 2)
    before = await engine.client.generate(PROMPT, GREEDY)
    await send(engine, plan_update(models("qwen3", 1), 1), tmp_path, "of a dead driver")
    wrong = WeightManifest(version=1, tensors=update.manifest.tensors[1:])
    with pytest.raises(EngineError, match="not in the update"):
        await engine.client.begin_weight_update("u", wrong)
    await engine.client.begin_weight_update("u", update.manifest)
    with pytest.raises(EngineError, match="'of a dead driver' is not open"):
        await engine.client.commit_weight_update("of a dead driver")
    with pytest.raises(EngineError, match="never arrived"):
        await engine.client.commit_weight_update("u")
    await assert_serves_old(engine, before)
    await send(engine, update, tmp_path, "v")
    await engine.client.commit_weight_update("v")
    assert await engine.client.weight_version() == 2


async def test_bodies_that_are_not_updates(shared_engine) -> None:
    status, answer = await shared_engine.post("/update_weights_from_tensor", {"serialized_named_tensors": ["..."]})
    assert status == 400
    assert "pickled tensors run code" in answer["message"]
    for path, body, field in (
        ("/begin_weight_update", {"manifest": {}}, "update_id"),
        ("/begin_weight_update", {"update_id": "u", "manifest": {"version": -1, "tensors": []}}, "manifest"),
        ("/update_weights_from_tensor", {"load_format": "miles_shm", "bucket": 3}, "bucket"),
        ("/end_weight_update", {"update_id": "u", "commit": "yes"}, "commit"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/get_weights_by_name", {"name": "nope"}, "name"),
        ("/weights_checker", {"action": "hope"}, "action"),
    ):
        status, answer = await shared_engine.post(path, body)
        assert (status, answer["field"]) == (400, field), path


async def test_a_sender_in_float32_updates_an_engine_in_bfloat16(models, serve, tmp_path: Path) -> None:
    engine = await serve(models("qwen3", 0), dtype="bfloat16")
    update = plan_update(models("qwen3", 1), 1)
    await send(engine, update, tmp_path)
    await engine.client.commit_weight_update("u")
    name = "model.layers.0.self_attn.q_proj.weight"
    _, rows = await engine.post("/get_weights_by_name", {"name": name, "truncate_size": 3})
    assert torch.equal(torch.tensor(rows), update.tensors[name][:3].bfloat16().float())


async def test_disk_update(models, serve, tmp_path: Path) -> None:
    engine = await serve(models("qwen3_moe", 0))
    want = await (await serve(models("qwen3_moe", 1))).client.generate(PROMPT, GREEDY)
    before = await engine.client.generate(PROMPT, GREEDY)
    for folder, reason in (
        (tmp_path / "none", "does not exist"),
        (models("qwen3"), "no such tensor|are not in the update|shape"),
    ):
        with pytest.raises(EngineError, match=reason):
            await engine.client.load_from_disk(folder, 4)
        await assert_serves_old(engine, before)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(EngineError, match="broken"):
        await engine.client.load_from_disk(broken, 4)
    await assert_serves_old(engine, before)
    await engine.client.load_from_disk(models("qwen3_moe", 1), 4)
    got = await engine.client.generate(PROMPT, GREEDY)
    assert got.output_ids.tolist() == want.output_ids.tolist()
    assert got.version_spans[0].version == 4


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_an_update_in_the_middle_of_sequences(models, serve, tmp_path: Path, mode: PauseMode) -> None:
    """Spans say exactly which weights sampled which token, and the log-probs are those of these weights.

    Retract: later tokens see keys of the new weights only. In place: keys of old tokens stay those of the old
    weights; the first new token's log-prob then differs from both pure models.
    """
    engine = await serve(models("llama", 0))
    params = SamplingParams(max_new_tokens=150, ignore_eos=True, seed=3)
    prompts = [PROMPT, [*PROMPT, 3], [4, 4]]
    tasks = [asyncio.create_task(engine.client.generate(p, params)) for p in prompts]
    await until(lambda: engine.core.sampled_tokens >= 100)
    await engine.client.pause(mode)
    update = plan_update(models("llama", 1), 1)
    await send(engine, update, tmp_path, bucket_bytes=1 << 20)
    await engine.client.commit_weight_update("u")
    await engine.client.resume()
    late = await engine.client.generate(PROMPT, GREEDY)
    assert late.cached_tokens == 0 or mode is PauseMode.RETRACT
    results = await asyncio.gather(*tasks)
    fresh = await (await serve(models("llama", 1))).client.generate(PROMPT, GREEDY)
    assert late.output_ids.tolist() == fresh.output_ids.tolist()
    old, new = make_model("llama", 0).double(), make_model("llama", 1).double()
    for prompt, result in zip(prompts, results, strict=True):
        first, second = result.version_spans
        assert (first.version, second.version) == (0, 1)
        assert (first.start, first.end, second.end) == (0, second.start, 150)
        tokens = torch.tensor([[*prompt, *result.output_ids.tolist()]])
        for model, span in ((old, first), (new, second)):
            with torch.inference_mode():
                exact = torch.log_softmax(model(input_ids=tokens).logits[0, :-1], dim=-1)
            chosen = exact.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0].numpy()
            error = np.abs(chosen - result.logprobs)[span.start : span.end].max()
            if span is second and mode is PauseMode.IN_PLACE:
                assert error > 1e-3  # the cache of the old weights is still in use
            else:
                assert error < 2e-5


async def test_an_update_without_a_pause_computes_running_requests_again(models, serve) -> None:
    engine = await serve(models("llama", 0))
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, seed=3)
    task = asyncio.create_task(engine.client.generate(PROMPT, params))
    await until(lambda: engine.core.sampled_tokens >= 20)
    await engine.client.load_from_disk(models("llama", 1), 1)
    result = await task
    first, second = result.version_spans
    assert (first.version, second.version) == (0, 1)
    tokens = torch.tensor([[*PROMPT, *result.output_ids.tolist()]])
    with torch.inference_mode():
        exact = torch.log_softmax(make_model("llama", 1).double()(input_ids=tokens).logits[0, :-1], dim=-1)
    chosen = exact.gather(1, tokens[0, 1:, None])[len(PROMPT) - 1 :, 0].numpy()
    assert np.abs(chosen - result.logprobs)[second.start :].max() < 2e-5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_layout_reads_what_save_pretrained_writes(models, family: str) -> None:
    from engine_weights import canonical_tensors

    layout = WeightLayout(make_model(family))
    saved = canonical_tensors(models(family))
    assert set(layout.places) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(layout.read(name), tensor), name
