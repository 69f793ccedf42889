"""A weight update is all or nothing, exact, and visible in the versions of the tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_weights import plan_update, write_buckets

from miles_contracts import SamplingParams

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "qwen3_next"])
async def test_update_equals_model_with_those_weights(models, serve, family: str, tmp_path: Path) -> None:
    old = await serve(models(family, 0))
    new = await serve(models(family, 1))
    before = await old.client.generate(PROMPT, GREEDY)
    want = await new.client.generate(PROMPT, GREEDY)
    assert not np.array_equal(before.output_ids, want.output_ids)

    update = plan_update(models(family, 1), version=7)
    await old.client.begin_weight_update("u", update.manifest)
    for bucket in write_buckets(update, tmp_path, "u", bucket_bytes=4096):
        await old.client.load_bucket(bucket)
    unchanged = await old.client.generate(PROMPT, GREEDY)
    assert unchanged.output_ids.tolist() == before.output_ids.tolist()
    assert unchanged.version_spans[0].version == 0
    await old.client.commit_weight_update("u")

    got = await old.client.generate(PROMPT, GREEDY)
    assert got.output_ids.tolist() == want.output_ids.tolist()
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert got.version_spans[0].version == 7
    assert await old.client.weight_version() == 7
    _, mine = await old.post("/weights_checker", {"action": "checksum"})
    _, theirs = await new.post("/weights_checker", {"action": "checksum"})
    assert mine["tensors"] == theirs["tensors"]
