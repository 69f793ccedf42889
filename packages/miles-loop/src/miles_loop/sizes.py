"""How much memory the processes of a run take, from measured bases and the shape of its model; estimates."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from miles_contracts import InvalidFieldError
from miles_loop.config import EngineConfig, RunConfig
from miles_loop.models import cached_folder, max_context
from miles_loop.recipe import Recipe
from miles_rollout.engine_identity import EngineKind
from miles_rollout.imports import load_object
from miles_sync.models import find_model

DRIVER_MIB, WORKER_MIB, ENGINE_MIB, TRAINER_MIB, SGLANG_MIB, ROUTER_MIB = 50, 50, 430, 430, 2100, 60
"""What a process takes with the smallest model, measured: memory that it shares with no other process."""
ANSWER_KIB = 9
"""Memory of the driver for an answer that is under way, measured."""
_MIB = 2**20
_CACHE_MIB = 2048
"""Most memory that the embedded engine gives its keys and values by default."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER_BYTES = 16
"""Bytes of a trained parameter: master weight, gradient and two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a model folder holds.

    Attributes:
        parameters: numbers in all its tensors.
        itemsize: bytes of one of them, in the folder.
        cached: numbers that a token of context leaves in an engine's cache; None for a model of an unknown kind.
        context: longest sequence; None when it does not say.
    """

    parameters: int
    itemsize: float
    cached: int | None
    context: int | None


def model_size(folder: Path, context: int | None = None) -> ModelSize | None:
    """Read the headers of a folder's safetensors; None without any that can be read.

    Args:
        folder: of the model.
        context: longest sequence that it declares.
    """
    parameters, size = 0, 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            header = _header(file)
        except (OSError, ValueError):
            return None
        for name, tensor in header.items():
            if name != "__metadata__":
                parameters += math.prod(tensor["shape"])
                size += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    if not parameters:
        return None
    try:
        cached: int | None = find_model(str(folder)).shape().cache_elements
    except InvalidFieldError:
        cached = None
    return ModelSize(parameters=parameters, itemsize=size / parameters, cached=cached, context=context)


def size_of(recipe: Recipe, config: RunConfig, run: Path | None = None) -> ModelSize | None:
    """The size of a run's model; None for one that is not here.

    A light model that the recipe makes is made for that, somewhere else and in a moment; a heavy one is only looked
    for where it is kept.

    Args:
        recipe: knows models by name.
        config: of the run.
        run: folder of a run that is continued.
    """
    preset = recipe.model_named(config.model)
    if preset is None:
        folder = Path(config.model)
    elif run is not None and not preset.heavy:
        folder = run / "model"
    elif preset.heavy:
        folder = cached_folder(recipe, preset)
    else:
        with tempfile.TemporaryDirectory(prefix="miles-") as made:
            load_object(preset.build, field="ModelPreset.build")(Path(made), config.seed)
            return model_size(Path(made), max_context(Path(made)))
    return model_size(folder, max_context(folder)) if (folder / "config.json").is_file() else None


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    """The table of a safetensors file."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 2 <= length <= 100 * _MIB:
            raise ValueError(f"no safetensors: a header of {length} bytes")
        header: dict[str, dict[str, list[int]]] = json.loads(data.read(length))
    return header


def answers_under_way(config: RunConfig) -> int:
    """Most answers that a run samples at the same time."""
    rollout = config.rollout
    admitted = (config.pipeline_depth + 1) * rollout.groups_per_step * rollout.group_size
    return min(admitted, rollout.max_in_flight or admitted)


def driver_mib(config: RunConfig) -> int:
    """Memory of the driver, with the answers that it has under way."""
    return DRIVER_MIB + answers_under_way(config) * ANSWER_KIB // 1024


def engine_mib(config: EngineConfig, model: ModelSize | None) -> int | None:
    """Memory of one engine process of this machine; None for a model that is not here.

    Weights count twice: the new ones are kept beside the old until all of them are there.
    """
    base = SGLANG_MIB if config.kind is EngineKind.SGLANG else ENGINE_MIB
    if model is None:
        return None
    each = _BYTES.get(config.dtype, model.itemsize)
    cache = _cache_mib(config, model, each) if config.kind is EngineKind.EMBEDDED else 0
    return base + math.ceil(2 * model.parameters * each / _MIB) + cache


def _cache_mib(config: EngineConfig, model: ModelSize, each: float) -> int:
    context = config.max_context or model.context
    if model.cached is None or context is None:
        return _CACHE_MIB
    return min(_CACHE_MIB, math.ceil(context * config.max_batch * model.cached * each / _MIB))


def trainer_mib(config: RunConfig, model: ModelSize | None) -> int | None:
    """Memory of one trainer rank before its activations; None for a model that is not here."""
    if model is None:
        return None
    dtype = config.trainer.dtype
    each = model.itemsize if dtype == "auto" else _BYTES[dtype]
    total = model.parameters * (_MASTER_BYTES + (each if each < 4 else 0))
    kl = config.trainer.objective.kl
    if kl.coefficient or kl.monitor:
        total += model.parameters * each
    return TRAINER_MIB + math.ceil(total / _MIB)


def checkpoint_mib(model: ModelSize) -> int:
    """Room of one checkpoint: the model, the optimiser's moments, and master weights where the model is narrower."""
    master = 4 if model.itemsize < 4 else 0
    return math.ceil(model.parameters * (model.itemsize + master + 8) / _MIB)
