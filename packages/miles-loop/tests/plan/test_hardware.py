"""Rates from data sheets: hand-computed times, and refusals."""

from __future__ import annotations

import pytest

from miles_contracts import InvalidFieldError
from miles_loop.options import build
from miles_loop.plan.config import HardwareSection, PlanConfig
from miles_loop.plan.hardware import GPUS, Placement
from miles_sync.models import find_model, known_models


def test_the_option_names_every_model_that_is_known() -> None:
    described = HardwareSection.model_fields["model"].description or ""
    assert [name for name in known_models() if f"`{name}`" not in described] == []


def placement(**hardware: object) -> Placement:
    given = {"model": "qwen3-8b", "gpu": "h100", "train_gpus": 8, "rollout_gpus": 4} | hardware
    found = build(PlanConfig, [{"hardware": given}]).placement()
    assert found is not None
    return found


def test_a_dense_model_by_hand() -> None:
    found = placement(bandwidth_use=0.5, decode_use=0.5, layer_overhead_us=10, train_use=0.4, logprob_passes=0)
    engine, trainer = found.engine_rates(), found.trainer_rates()
    always = find_model("qwen3-8b").shape().always
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
