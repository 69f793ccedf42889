"""The lean forward pass is taken by models that are exactly what it computes, and by no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import FAMILIES, make_model
from transformers.models.llama.modeling_llama import LlamaAttention

from miles_rollout.engine import attention, lean
from miles_rollout.engine.loading import load

LEAN = {"qwen3", "qwen2", "llama", "llama_bias", "mistral"}


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def test_families_with_a_lean_pass(models) -> None:
    for family in sorted(FAMILIES):
        loaded = load(models(family), "auto", "cpu")
        assert loaded.lean == (family in LEAN), family
        assert loaded.forward is not None or not loaded.slots


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.layers[1].mlp.add_module("extra", torch.nn.Linear(2, 2)),
        lambda m: m.model.layers[1].add_module("extra_norm", torch.nn.LayerNorm(2)),
        lambda m: m.model.layers[1].self_attn.add_module("gate", torch.nn.Linear(2, 2)),
        lambda m: m.model.add_module("extra", torch.nn.Linear(2, 2)),
        lambda m: m.add_module("head_norm", torch.nn.LayerNorm(2)),
        lambda m: setattr(m.model, "norm", torch.nn.LayerNorm(32)),
        lambda m: m.model.layers[0].self_attn.__setattr__("q_proj", torch.nn.Sequential(torch.nn.Linear(32, 32))),
    ],
)
def test_any_other_module_rules_it_out(change: Callable[[Any], None]) -> None:
    model = make_model("llama")
    assert lean.build(model) is not None
    change(model)
    assert lean.build(model) is None


def test_windows_are_those_that_the_model_asks_for() -> None:
    calls = attention.observe(make_model("mistral"))
    assert [calls[i].window for i in range(3)] == [8, 8, 8]
    calls = attention.observe(make_model("gemma2"))
    assert [calls[i].window for i in range(3)] == [8, None, 8]
    assert all(calls[i].special for i in range(3))
    assert attention.observe(make_model("gpt_oss"))[0].special


def test_attention_that_changes_with_the_position_is_found_out(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to position 200 this model is a plain Llama; probes of short prompts could not tell."""
    original = LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = kwargs["position_ids"]
        factor = 1.0 + 0.5 * (positions > 200).float()
        return original(self, hidden_states * factor[..., None], *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    loaded = load(models("llama"), "auto", "cpu")
    assert loaded.slots
    assert not loaded.lean
