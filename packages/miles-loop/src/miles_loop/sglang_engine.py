"""SGLang as the engine of a run: what is started, and which models it would serve wrongly."""

from __future__ import annotations

from pathlib import Path

from miles_contracts import InvalidFieldError
from miles_loop.config import EngineConfig
from miles_loop.models import declared, num_experts
from miles_loop.processes import ProcessSpec
from miles_rollout.sglang_launch import SERVER_MODULE, sglang_arguments, sglang_environment


def sglang_spec(config: EngineConfig, index: int, port: int, model: Path) -> ProcessSpec:
    """Process of one SGLang engine; a mixture-of-experts model's expert choices are always recorded.

    Raises:
        InvalidFieldError: a model that SGLang would serve wrongly.
    """
    check_model(model)
    mixture = num_experts(model) is not None
    options = config.sglang.model_copy(update={"routed_experts": True}) if mixture else config.sglang
    arguments = sglang_arguments(
        options,
        model_path=str(model),
        host=config.host,
        port=port,
        dtype=config.dtype,
        context_length=config.max_context,
        max_running_requests=config.max_batch,
        weight_version=0,
        extra=config.extra_args,
    )
    return ProcessSpec(
        name=f"engine-{index}",
        module=SERVER_MODULE,
        arguments=tuple(arguments),
        threads=config.threads,
        environment={"HF_HUB_OFFLINE": "1", **sglang_environment(options), **config.environment},
        python=config.python,
    )


def check_model(model: Path) -> None:
    """Refuse a mixture-of-experts model whose output head is its embedding.

    SGLang's mixtures have a head of their own; for a checkpoint without one they would serve whatever is in its
    memory, without a word.

    Raises:
        InvalidFieldError: such a model.
    """
    if num_experts(model) is not None and declared(model, "tie_word_embeddings") is True:
        reason = "SGLang serves no mixture of experts with tied embeddings"
        raise InvalidFieldError("model", str(model), f"{reason}; use one with an lm_head, or --rollout.engine embedded")
