"""The engine against the model's own forward pass, in float64, for several families of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_driving import finish_all, float64_logprobs, make_core, request, worst_error
from engine_models import FAMILIES, VOCAB, float64_model, make_model

from miles_rollout.engine.loading import load, unsuitable
from miles_rollout.engine.sequence import Sequence

MAX_ERROR = 2e-5
"""Nats. Float32 engine against a float64 pass of the same weights: what is left is float32 rounding."""
NATIVE = {"qwen3_next", "glm_moe_dsa", "deepseek_v32"}


def ragged(count: int, **params: object) -> list[Sequence]:
    """Requests with prompts of 1 .. 40 tokens, some with a shared start, and 3 .. 30 new tokens."""
    draw = np.random.default_rng(3)
    shared = draw.integers(2, VOCAB, size=20).tolist()
    made = []
    for i in range(count):
        prompt = draw.integers(2, VOCAB, size=int(draw.integers(1, 40))).tolist()
        prompt = shared + prompt[:5] if i % 3 == 0 else prompt
        made.append(request(prompt, int(draw.integers(3, 30)), str(i), seed=i, **params))
    return made


def test_every_family_takes_the_path_it_should(models) -> None:
    for family in FAMILIES:
        loaded = load(models(family), "auto", "cpu")
        assert loaded.slots == (family not in NATIVE), (family, loaded.reason)
        assert bool(loaded.reason) == (family in NATIVE)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logprobs_match_float64(models, family: str, record_property) -> None:
    core = make_core(models(family), chunked_prefill_size=32, max_running_requests=9)
    sequences = ragged(16, temperature=0.8)
    finish_all(core, sequences)
    reference = float64_model(family)
    error = max(worst_error(reference, s, 0.8) for s in sequences)
    record_property("max_logprob_error", error)
    assert error < MAX_ERROR


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "qwen3_next"])
def test_greedy_equals_generate(models, family: str) -> None:
    core = make_core(models(family))
    prompts = [[5, 9, 33, 7], [8, 8, 2, 90, 14, 3, 77]]
    sequences = [request(p, 20, str(i), temperature=0.0) for i, p in enumerate(prompts)]
    finish_all(core, sequences)
    model = make_model(family)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=None
            )
        assert sequence.output_ids == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_native_path_agrees_with_slots(models, family: str) -> None:
    fast, slow = ragged(8), ragged(8)
    finish_all(make_core(models(family)), fast)
    core = make_core(models(family), force_native_cache=True)
    assert core.loaded.reason == "asked for"
    finish_all(core, slow)
    for a, b in zip(fast, slow, strict=True):
        assert a.output_ids == b.output_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=MAX_ERROR)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("start", [0, 1, 5, 29])
def test_prompt_logprobs(models, family: str, start: int) -> None:
    prompt = np.random.default_rng(0).integers(2, VOCAB, size=30).tolist()
    core = make_core(models(family), chunked_prefill_size=7)
    finish_all(core, [request(prompt, 2, "warm")])  # a cached prefix must not hide logits that are asked for
    sequence = request(prompt, 3, "scored", first_logprob=start)
    finish_all(core, [sequence])
    exact = float64_logprobs(float64_model(family), prompt)
    first = max(start, 1)
    want = [float(exact[t - 1, prompt[t]]) for t in range(first, len(prompt))]
    np.testing.assert_allclose(sequence.prompt_logprobs, want, atol=MAX_ERROR)
    assert sequence.num_new == 3


def test_a_model_in_bfloat16_stays_close(models) -> None:
    core = make_core(models("qwen3"), dtype="bfloat16")
    assert core.loaded.slots
    sequences = ragged(6)
    finish_all(core, sequences)
    assert max(worst_error(make_model("qwen3").double(), s) for s in sequences) < 0.5


def test_structures_that_rule_slots_out(models) -> None:
    model = make_model("qwen3")
    assert unsuitable(model) == ""
    model.config.layer_types = ["full_attention", "mamba", "full_attention"]
    assert "mamba" in unsuitable(model)
    model = make_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in unsuitable(model)


def test_a_wrong_slot_path_is_found_out(models, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_rollout.engine import attention

    def forgetful(*args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        out, none = original(*args, **kwargs)
        return out * 1.01, none

    original = attention.slot_attention
    monkeypatch.setattr(attention, "slot_attention", forgetful)
    loaded = load(models("qwen3"), "auto", "cpu")
    assert not loaded.slots
    assert "differs from the model's forward pass" in loaded.reason
    monkeypatch.undo()
    attention.register()


def test_seeded_tokens_do_not_depend_on_the_company(models) -> None:
    """Same seed, same tokens: alone, in a crowd, in small chunks, after retractions, from a warm cache.

    Float rounding may differ with the shape of a batch, so a number that falls within about 1e-7 of a boundary
    between two tokens could land on either side; 600 tokens here would show anything coarser.
    """
    watched = [([7, 3, 50, 4, 4, 9], 60, i) for i in range(10)]

    def run(options: dict[str, object], crowd: int) -> tuple[list[list[int]], int]:
        core = make_core(models("qwen3"), **options)
        others = [request([i % 100 + 2] * (i % 17 + 1), 40, f"c{i}", seed=1000 + i) for i in range(crowd)]
        mine = [request(p, n, f"w{s}", seed=s, top_p=0.9 if s % 2 else 1.0) for p, n, s in watched]
        mixed = [s for pair in zip(others, mine, strict=False) for s in pair] + others[len(mine) :]
        mixed += [s for s in mine if s not in mixed]
        finish_all(core, mixed)
        return [s.output_ids for s in mine], core.scheduler.retracted

    alone = []
    for prompt, new, seed in watched:
        sequence = request(prompt, new, "alone", seed=seed, top_p=0.9 if seed % 2 else 1.0)
        finish_all(make_core(models("qwen3")), [sequence])
        alone.append(sequence.output_ids)
    assert run({}, 0)[0] == alone
    assert run({}, 24)[0] == alone
    assert run({"chunked_prefill_size": 3}, 12)[0] == alone
    squeezed, retractions = run({"max_total_tokens": 200}, 30)
    assert retractions > 0
    assert squeezed == alone
