"""The options that a measurement uses, and the configuration that its command line asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError
from miles_loop.arguments import Parsed, config_for, task_layer
from miles_loop.checkpoint import newest_checkpoint
from miles_loop.config import RunConfig
from miles_loop.options import build, merge, read_toml
from miles_loop.recipe import Recipe
from miles_loop.run_folder import RunFolder

_USED = (
    "hardware",
    "model",
    "seed",
    "task",
    "engine",
    "router",
    "evaluation.samples",
    "evaluation.ks",
    "evaluation.sampling",
    "rollout.timeout_s",
    "rollout.reward_timeout_s",
    "rollout.max_prompt_tokens",
    "runtime.kind",
    "runtime.ray",
    "runtime.rollout_workers",
    "runtime.rollout_restarts",
    "runtime.rollout_hang_s",
    "runtime.stop_timeout_s",
)
_TRAINER = "runtime.ray.trainer_"
_OF_RUN = ("model", "hardware")
"""What `--run` says itself: the model is its checkpoint, and a target is stored option by option."""


def uses(path: str) -> bool:
    """Whether a measurement depends on the option of this dotted name; all others are about training."""
    return not path.startswith(_TRAINER) and any(path == name or path.startswith(f"{name}.") for name in _USED)


def eval_config(recipe: Recipe, parsed: Parsed) -> RunConfig:
    """The configuration that an `eval` command line asks for: a run's own with `--run`, a new run's otherwise.

    A task that is named replaces the run's whole: nothing of the other is left in it.

    Raises:
        InvalidFieldError: naming field, value and remedy.
    """
    if "run" not in parsed.flags:
        return config_for(recipe, parsed)
    folder = RunFolder(Path(parsed.flags["run"]))
    stored = folder.read_config()
    if stored.recipe != recipe.family:
        raise InvalidFieldError("--run", str(folder.path), f"it is a run of miles-{stored.recipe}")
    checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise InvalidFieldError("--run", str(folder.path), "it has no checkpoint yet")
    for name in _OF_RUN:
        if name in parsed.settings:
            remedy = "--run says it already; leave one of the two out"
            raise InvalidFieldError(name, parsed.settings[name], remedy)
    file = read_toml(Path(parsed.flags["config"])) if "config" in parsed.flags else {}
    own: dict[str, Any] = read_toml(folder.config_file)
    asked = merge(file, parsed.settings)
    task: dict[str, Any] = {}
    if _names_another(asked.get("task"), own.get("task", {})):
        own.pop("task", None)
        task = task_layer(recipe, asked["task"])
        asked = merge(asked, {"task": {"preset": task["task"].get("preset")}})
    return build(
        RunConfig, [own, {k: v for k, v in task.items() if k != "model"}, asked, {"model": str(checkpoint / "hf")}]
    )


def _names_another(asked: Any, own: Any) -> bool:
    """Whether a task's source is asked for, and it is not the run's."""
    if not isinstance(asked, dict):
        return False
    return any(name in asked and asked[name] != own.get(name) for name in ("preset", "path", "dataset"))
