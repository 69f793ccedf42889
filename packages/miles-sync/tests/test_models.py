"""Models on paper: published parameter counts, a real model of the family, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_contracts import InvalidFieldError
from miles_sync.models import Attention, Cut, architecture_of, find_model, known_models


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
    shape = find_model(model).shape()
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
    shape = architecture_of("tiny", config.to_dict()).shape()
    assert shape.total == counted
    assert shape.expert_share == 0.25
    assert shape.cache_elements == 3 * 2 * 2 * 32


def test_latent_attention_keeps_little_and_the_sparse_index_reads_less() -> None:
    full, sparse = find_model("kimi-k2").shape(), find_model("deepseek-v3.2").shape()
    assert full.cache_elements == 61 * 576
    assert full.read_per_context == full.cache_elements
    assert (sparse.cache_elements, sparse.read_per_context) == (61 * (576 + 128), 61 * 128)
    assert sparse.read_per_sequence == 61 * 2048 * 576


def test_a_folder_is_read(tmp_path: Path) -> None:
    config = known_models()["qwen3-8b"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert find_model(str(tmp_path)).shape().total == find_model("qwen3-8b").shape().total


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
        architecture_of("x", known_models()["qwen3-8b"] | config)


@pytest.mark.parametrize(
    ("key", "value"), [("decoder_sparse_step", 2), ("moe_layer_freq", [0, 1, 1]), ("mlp_only_layers", [0])]
)
def test_experts_in_some_layers_only_are_refused(key: str, value: object) -> None:
    known = known_models()
    with pytest.raises(InvalidFieldError, match=f"{key} = .*in some of its layers only"):
        architecture_of("x", known["qwen3-30b-a3b"] | {key: value})
    plain = {"decoder_sparse_step": 1, "moe_layer_freq": 1, "mlp_only_layers": []}
    assert architecture_of("x", known["qwen3-30b-a3b"] | plain).dense_layers == 0
    assert architecture_of("x", known["qwen3-8b"] | {key: value}).experts == 0


def test_models_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="did you mean 'qwen3-32b'"):
        find_model("qwen3-31b").shape()
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidFieldError, match="no JSON object"):
        find_model(str(tmp_path)).shape()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidFieldError, match="cannot be read"):
        find_model(str(tmp_path)).shape()


def test_tensors_travel_in_the_dtypes_that_are_asked_for() -> None:
    tensors = find_model("glm-5.2").tensors(expert_dtype="float8_e4m3fn")
    assert {t.spec.dtype for t in tensors if t.cut is Cut.EXPERT} == {"float8_e4m3fn"}
    assert {t.spec.dtype for t in tensors if t.cut is not Cut.EXPERT} == {"bfloat16"}
    names = [t.spec.name for t in tensors]
    assert names == sorted(names)
    index = [t.spec for t in tensors if ".000.self_attn.indexer." in t.spec.name]
    assert [spec.shape for spec in index] == [(32, 6144), (128, 6144), (32 * 128, 2048)]


def test_latent_attention_without_a_rank_of_its_own_for_queries() -> None:
    attention = Attention(heads=4, kv_lora=8, nope_dim=2, rope_dim=1, v_dim=3)
    shapes = {name.removeprefix("self_attn."): shape for name, _, shape in attention.tensors(16)}
    assert shapes == {
        "q_proj.weight": (12, 16),
        "kv_a_proj.weight": (9, 16),
        "kv_b_proj.weight": (20, 8),
        "o_proj.weight": (16, 12),
    }
