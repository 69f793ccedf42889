"""SGLang as the engine of a run: what is started, and which models it would serve wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
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


_ASK = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('sglang') is None else 0)"
_ABSENT = 3
_ASK_S = 60.0


def require_sglang(config: EngineConfig) -> None:
    """Refuse an interpreter that cannot be run or has no SGLang; what else may be wrong shows when it is started.

    Raises:
        InvalidFieldError: with what to install or to set.
    """
    python = config.python or sys.executable
    try:
        asked = subprocess.run(
            [python, "-c", _ASK],
            env={**os.environ, **config.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_ASK_S,
        )
    except OSError as error:
        remedy = f"cannot be run: {error.strerror}; name the Python interpreter that has SGLang"
        raise InvalidFieldError("engine.python", python, remedy) from error
    except subprocess.TimeoutExpired:
        return  # a slow machine says nothing about what is installed
    if asked.returncode == _ABSENT:
        remedy = (
            "SGLang is not installed there; give the interpreter of an environment that has it, for example "
            "--engine.python /opt/sglang/bin/python, or: pip install sglang (best in an environment of its own)"
        )
        raise InvalidFieldError("engine.python", python, remedy)


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
