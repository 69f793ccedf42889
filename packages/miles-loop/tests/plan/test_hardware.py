"""Rates from data sheets: published parameter counts, hand-computed times, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_contracts import InvalidFieldError
from miles_loop.options import build
from miles_loop.plan.config import PlanConfig
from miles_loop.plan.hardware import GPUS, Placement
from miles_loop.plan.shapes import find_shape, known_models, shape_of


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("glm-5.2", 744e9, 40e9),
        ("glm-4.5-air", 106e9, 12e9),
        ("deepseek-v3.2", 671e9, 37e9),
        ("kimi-k2", 1.04e12, 32e9),
        ("qwen3-0.6b", 0.6e9, 0.6e9),
        ("qwen3-4b", 4.0e9, 4.0e9),
        ("qwen3-8b", 8.2e9, 7.6e9),
        ("qwen3-32b", 32.8e9, 32.0e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
    ],
)
def test_parameter_counts_are_the_published_ones(model: str, total: float, active: float) -> None:
    # Published totals count everything; some published active counts leave the input embedding out, as we do.
    shape = find_shape(model)
    assert shape.total == pytest.approx(total, rel=0.02)
    assert shape.active == pytest.approx(active, rel=0.12)


def test_every_known_model_is_checked_above() -> None:
    mark = test_parameter_counts_are_the_published_ones.pytestmark[0]  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(known_models())


def test_parameters_of_a_real_model_of_the_family() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=100,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    shape = shape_of("tiny", config.to_dict())
    assert shape.total == counted
    assert shape.expert_share == 0.25
    assert shape.cache_elements == 3 * 2 * 2 * 32


def test_latent_attention_keeps_little_and_the_sparse_index_reads_less() -> None:
    full, sparse = find_shape("kimi-k2"), find_shape("deepseek-v3.2")
    assert full.cache_elements == 61 * 576
    assert full.read_per_context == full.cache_elements
    assert (sparse.cache_elements, sparse.read_per_context) == (61 * (576 + 128), 61 * 128)
    assert sparse.read_per_sequence == 61 * 2048 * 576


def test_a_folder_is_read(tmp_path: Path) -> None:
    config = known_models()["qwen3-8b"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert find_shape(str(tmp_path)).total == find_shape("qwen3-8b").total


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"mamba_num_heads": 4}, "mamba_num_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_shapes_that_are_not_known_are_refused(config: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidFieldError, match=says):
        shape_of("x", known_models()["qwen3-8b"] | config)


def test_models_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="did you mean 'qwen3-32b'"):
        find_shape("qwen3-31b")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidFieldError, match="no JSON object"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidFieldError, match="cannot be read"):
        find_shape(str(tmp_path))


def placement(**hardware: object) -> Placement:
    given = {"model": "qwen3-8b", "gpu": "h100", "train_gpus": 8, "rollout_gpus": 4} | hardware
    found = build(PlanConfig, [{"hardware": given}]).placement()
    assert found is not None
    return found


def test_a_dense_model_by_hand() -> None:
    found = placement(bandwidth_use=0.5, decode_use=0.5, layer_overhead_us=10, train_use=0.4, logprob_passes=0)
    engine, trainer = found.engine_rates(), found.trainer_rates()
    always = find_shape("qwen3-8b").always
    assert (found.engines, found.engine_gpus) == (4, 1)
    alone = always * 2 / (3.35e12 * 0.5) + 36 * 10e-6
    assert engine.step_s(1, 0) == pytest.approx(alone)
    # keys and values: 36 layers x 8 heads x 128 x 2 numbers of two bytes
    assert engine.step_s(1, 1000) == pytest.approx(alone + 1000 * 36 * 8 * 128 * 2 * 2 / (3.35e12 * 0.5))
    assert engine.step_s(4000, 0) == pytest.approx(4000 * 2 * always / (989e12 * 0.5) + 36 * 10e-6)
    assert trainer.per_token_s == pytest.approx(8 * always / (8 * 989e12 * 0.4))
    assert trainer.fixed_s == 0.0
    assert trainer.pause_s == pytest.approx(found.weight_bytes / 12.8e9)


def test_an_engine_gets_as_many_gpus_as_its_weights_need() -> None:
    large = placement(model="glm-5.2", gpu="gb300", weights="fp8", cache="fp8", rollout_gpus=32)
    assert (large.engine_gpus, large.engines) == (4, 8)
    assert large.weight_bytes == pytest.approx(744e9, rel=0.01)
    streamed = placement(model="glm-5.2", gpu="gb300", train_gpus=32, rollout_gpus=32, stream_gb_per_s=5.0)
    assert streamed.trainer_rates().fixed_s == pytest.approx(2 * 279e9 / 5e9, rel=0.01)


@pytest.mark.parametrize(
    ("field", "hardware"),
    [
        ("hardware.gpu", {"gpu": "h1000"}),
        ("hardware.gpu", {"gpu": None}),
        ("hardware.train_gpus", {"train_gpus": None}),
        ("hardware.rollout_gpus", {"engine_gpus": 3}),
        ("hardware.weights", {"gpu": "a100", "weights": "fp8"}),
        ("hardware.training", {"gpu": "h100", "training": "fp4"}),
        ("hardware.engine_gpus", {"model": "glm-5.2", "engine_gpus": 1}),
    ],
)
def test_hardware_that_cannot_be_is_refused(field: str, hardware: dict[str, object]) -> None:
    def rates() -> None:
        found = placement(**hardware)
        found.engine_rates()
        found.trainer_rates()

    with pytest.raises(InvalidFieldError) as caught:
        rates()
    assert caught.value.field == field


def test_faster_gpus_are_faster() -> None:
    for slow, fast in (("a100", "h100"), ("h100", "h200"), ("h200", "b200"), ("b200", "gb300")):
        low, high = placement(gpu=slow), placement(gpu=fast)
        assert high.engine_rates().step_s(8, 8000) < low.engine_rates().step_s(8, 8000)
        assert high.trainer_rates().per_token_s <= low.trainer_rates().per_token_s
    assert all({"bf16"} <= set(gpu.tflops) for gpu in GPUS.values())
