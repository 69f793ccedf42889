"""From the name of a model to a folder that engines and trainer can load."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError
from miles_loop.errors import RunError
from miles_loop.files import disk_errors
from miles_loop.names import nearest
from miles_loop.processes import ProcessSpec, child_environment
from miles_loop.recipe import ModelPreset, Recipe
from miles_rollout.imports import load_object

_COMPLETE = ".complete"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
"""Files that hold weights in a Hugging Face folder."""


def cache_folder() -> Path:
    """Where models that are costly to make are kept: `$MILES_HOME/models`, by default `~/.cache/miles/models`."""
    home = os.environ.get("MILES_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "miles") / "models"


def cached_folder(recipe: Recipe, preset: ModelPreset) -> Path:
    """Where a heavy model of a recipe is kept once it is made."""
    return cache_folder() / f"{recipe.family}-{preset.name}"


async def resolve_model(recipe: Recipe, name: str, seed: int, run_model: Path, on_event: Callable[[str], None]) -> Path:
    """The folder of a model, made first if it has to be.

    Args:
        recipe: knows models by name; any other name is a folder.
        name: what `--model` says.
        seed: for a model that is made for this run.
        run_model: where such a model goes; one that is there already is taken (a resumed run).
        on_event: told, in words, about long work.

    Raises:
        InvalidFieldError: not a model folder; the message says what is missing.
        RunError: the model could not be made.
    """
    preset = recipe.model_named(name)
    if preset is None:
        return _named_folder(name, [m.name for m in recipe.models])
    if preset.heavy:
        return await _cached(recipe, preset, seed, on_event)
    return _light(preset, seed, run_model)


def _named_folder(name: str, known: list[str]) -> Path:
    check_model_folder(Path(name), known)
    return Path(name).resolve()


def _light(preset: ModelPreset, seed: int, run_model: Path) -> Path:
    if not (run_model / _COMPLETE).exists():
        _make(run_model, lambda folder: load_object(preset.build, field="ModelPreset.build")(folder, seed))
    return run_model.resolve()


def check_model_folder(path: Path, known: list[str] | None = None) -> None:
    """Refuse a folder that cannot be a model, before processes are started for it.

    Raises:
        InvalidFieldError: what is missing.
    """
    if not path.is_dir():
        names = f"; models of the recipe: {', '.join(known)}" if known else ""
        hint = nearest(str(path), known or [])
        raise InvalidFieldError("model", str(path), f"{hint}there is no such folder{names}")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise InvalidFieldError("model", str(path), f"the folder has no {name}; give a Hugging Face model folder")
    if not any(file.suffix in WEIGHT_SUFFIXES for file in path.iterdir()):
        raise InvalidFieldError("model", str(path), "the folder has no weights (model.safetensors)")


def _make(target: Path, build: Callable[[Path], None]) -> None:
    """Build into another folder, then rename: a model that is there is complete."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_errors(target):
            temporary.mkdir(parents=True)
            build(temporary)
            check_model_folder(temporary)
            (temporary / _COMPLETE).touch()
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


async def _cached(recipe: Recipe, preset: ModelPreset, seed: int, on_event: Callable[[str], None]) -> Path:
    target = cached_folder(recipe, preset)
    if (target / _COMPLETE).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        # Another run may be making it; both want the same result, so the second waits.
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not (target / _COMPLETE).exists():
            on_event(f"making the model {preset.name} (once; kept in {target})")
            await _make_in_child(target, preset, seed)
    return target


async def _make_in_child(target: Path, preset: ModelPreset, seed: int) -> None:
    spec = ProcessSpec(
        name="model", module="miles_loop.models", arguments=(preset.build, str(target), str(seed)), threads=2
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        spec.module,
        *spec.arguments,
        env=child_environment(spec),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        tail = "\n".join(output.decode("utf-8", "replace").splitlines()[-8:])
        raise RunError("model_failed", f"the model {preset.name} could not be made:\n{tail}")


def max_context(model: Path) -> int | None:
    """Longest sequence that a model folder declares, None when it does not say."""
    return _declared(model, "max_position_embeddings")


def num_experts(model: Path) -> int | None:
    """Experts of a layer of a mixture-of-experts model, None for a dense one."""
    return _declared(model, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def num_layers(model: Path) -> int | None:
    """Decoder layers of a model, None when it does not say."""
    return _declared(model, "num_hidden_layers")


def declared(model: Path, name: str) -> Any:
    """What config.json (or its text part) says under this name, None when it says nothing."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidFieldError("model", str(model / "config.json"), f"cannot be read: {error}") from error
    text = config.get("text_config", config)
    return text.get(name) if isinstance(text, dict) else None


def _declared(model: Path, *names: str) -> int | None:
    """The first of these that is a whole number above 0."""
    values = [declared(model, name) for name in names]
    return next((v for v in values if type(v) is int and v > 0), None)


def main() -> None:
    """Make one model: build function, folder, seed."""
    build, target, seed = sys.argv[1:4]
    _make(Path(target), lambda folder: load_object(build, field="ModelPreset.build")(folder, int(seed)))


if __name__ == "__main__":
    main()
