"""The whole thing on a tiny model: engine, trainer, weight updates, checkpoints, evaluation, export."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from loop_toy.harness import Command, alive, children, records, wait_for, wait_for_records, without_clock
from safetensors.numpy import load_file

from miles_loop.checkpoint import newest_checkpoint


def test_a_run_trains_records_and_can_be_used(toy: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = toy.run(
        "train", "--run-dir", run, "--plain", "--steps", 6, "--evaluation.every", 3, "--record.plot", "--seed", 3
    )
    assert "finished" in out
    found = records(run)
    assert [r["step"] for r in found] == list(range(7))
    assert [r["step"] for r in found if "eval/vowels/reward" in r] == [0, 3, 6]
    for record in found[1:]:
        assert record["rollout/token_mismatches"] == 0
        assert math.isfinite(record["train/loss"])
        if record["rollout/fully_async/max_staleness"] == 0:
            # The same float32 weights: what engine and trainer say of the same tokens differs by rounding only.
            assert record["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert record["rollout/fully_async/max_staleness"] <= 2
        assert record["perf/update_weights_bytes"] > 0
    assert found[-1]["eval/vowels/weight_version/mean"] == 6

    report = json.loads((run / "summary.json").read_text())
    assert (report["status"], report["steps"], report["token_mismatches"]) == ("finished", 6, 0)
    assert report["tokens_sampled"] >= report["tokens_trained"] > 0
    assert report["time_to_first_step_s"] > 0
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")

    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    before = load_file(run / "model" / "model.safetensors")
    after = load_file(checkpoint / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not np.array_equal(before[name], after[name]) for name in before)

    exported = tmp_path / "exported"
    assert "exported step 6" in toy.run("export", run, exported)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert model.config.model_type == "qwen3"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=True)
    assert len(ids) > 0
    assert "it exists and is not empty" in toy.run("export", run, exported, status=2)
    assert "there are checkpoints of steps 6" in toy.run("export", run, tmp_path / "x", "--step", 4, status=2)

    measured = json.loads(toy.run("eval", "--run", run, "--json"))
    assert measured["eval/vowels/reward"] == found[-1]["eval/vowels/reward"]


def test_a_killed_run_at_depth_0_cannot_be_told_from_a_whole_one(toy: Command, tmp_path: Path) -> None:
    run, whole = tmp_path / "killed", tmp_path / "whole"
    options = ("--plain", "--steps", 5, "--pipeline-depth", 0, "--checkpoint-every", 2, "--evaluation.every", 2)
    toy.run("train", "--run-dir", whole, *options)
    process = toy.start("train", "--run-dir", run, *options)
    wait_for_records(process, run, 4)
    started = children(process.pid)
    process.kill()
    process.wait()
    assert len(records(run)) >= 4
    wait_for(lambda: not any(alive(child) for child in started), 10)
    toy.run("train", "--resume", run, "--plain")
    assert without_clock(records(run)) == without_clock(records(whole))
    assert records(run, "ledger.jsonl") == records(whole, "ledger.jsonl")
    final = "checkpoints/step_000005/hf/model.safetensors"
    assert (run / final).read_bytes() == (whole / final).read_bytes()
