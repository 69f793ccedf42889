"""Configuration refuses what cannot be meant, and costs nothing to import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

import miles_trainer
from miles_trainer import TrainerConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"optimiser": {}}, "optimiser"),
    ({"optimizer": {"lr": -1.0}}, "lr"),
    ({"optimizer": {"lr": float("nan")}}, "lr"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "betas"),
    ({"optimizer": {"max_grad_norm": 0}}, "max_grad_norm"),
    ({"optimizer": {"schedule": {"kind": "cosine"}}}, "needs total_steps"),
    ({"optimizer": {"schedule": {"kind": "linear", "warmup_steps": 5, "total_steps": 5}}}, "greater than warmup_steps"),
    ({"objective": {"kind": "ppo"}}, "kind"),
    ({"objective": {"dual_clip": 1.0}}, "dual_clip"),
    ({"objective": {"clip_low": 1.0}}, "clip_low"),
    ({"objective": {"aggregation": "constant"}}, "aggregation_constant"),
    ({"objective": {"aggregation_constant": 5.0}}, "aggregation_constant"),
    ({"objective": {"correction": {"kind": "truncate"}}}, "count the gap twice"),
    ({"objective": {"correction": {"low": 3.0}}}, "low .3.0. must be below high"),
    ({"objective": {"correction": {"mask_low": 3.0}}}, "mask_low"),
    ({"objective": {"correction": {"kind": "pop", "level": "sequence"}}}, "works on tokens"),
    ({"objective": {"kl": {"coefficient": -0.1}}}, "coefficient"),
    ({"batching": {"max_tokens": 0}}, "max_tokens"),
    ({"batching": {"packing": "tight"}}, "packing"),
    ({"replay": {"incomplete": "pad"}}, "incomplete"),
    ({"advantage": {"estimator": "gae"}}, "estimator"),
    ({"dtype": "float16"}, "dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), BAD)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(values)


def test_defaults_and_round_trip() -> None:
    config = TrainerConfig()
    assert TrainerConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.replay.enabled
    with pytest.raises(ValidationError, match="frozen"):
        config.device = "cuda"  # type: ignore[misc]


def test_masks_and_veto_are_allowed_with_the_engines_logprobs() -> None:
    TrainerConfig.model_validate({"objective": {"correction": {"mask_level": "geometric", "veto": 1e-4}}})


def test_every_field_is_described() -> None:
    # the configuration reference of the documentation is made from these
    schema = TrainerConfig.model_json_schema()
    missing = [
        f"{section}.{name}"
        for section, body in (("TrainerConfig", schema), *schema["$defs"].items())
        for name, field in body.get("properties", {}).items()
        if not field.get("description")
    ]
    assert missing == []


def test_importing_the_configuration_needs_no_torch() -> None:
    code = (
        "import sys, miles_trainer, miles_trainer.config; miles_trainer.TrainerConfig(); miles_trainer.NonFiniteError; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_trainer_needs_no_transformers() -> None:
    code = "import sys, miles_trainer; miles_trainer.Trainer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names() -> None:
    for name in miles_trainer.__all__:
        assert getattr(miles_trainer, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Tainer'"):
        _ = miles_trainer.Tainer
