"""What can be refused before a run's folder is made: files that are not there, values that contradict each other."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from miles_contracts import InvalidFieldError
from miles_loop.config import EvaluationConfig, RunConfig, TaskSourceKind
from miles_loop.models import check_model_folder
from miles_loop.recipe import Recipe
from miles_trainer.config import ObjectiveKind


def check_run(recipe: Recipe, config: RunConfig) -> None:
    """Refuse what cannot be trained, at the cost of a few looks at the disk.

    Raises:
        InvalidFieldError: naming field, value and remedy.
    """
    _check_groups(config)
    if config.task.source is TaskSourceKind.JSONL:
        for field, path in (("task.path", config.task.path), ("task.eval_path", config.task.eval_path)):
            if path is not None:
                _require_file(field, path)
    elif config.task.source is TaskSourceKind.REASONING_GYM:
        _check_family(str(config.task.dataset))
    _check_program(config.evaluation)
    if recipe.model_named(config.model) is None:
        check_model_folder(Path(config.model), [model.name for model in recipe.models])


def _check_groups(config: RunConfig) -> None:
    """A group of one says nothing to an estimator that compares; `no_signal` has its own answer to it."""
    estimator = config.trainer.advantage.estimator
    rewarded = config.trainer.objective.kind is not ObjectiveKind.SFT
    if config.rollout.group_size == 1 and config.rollout.filter == "none" and rewarded and estimator.compares:
        raise InvalidFieldError(
            "rollout.group_size",
            1,
            f"{estimator} compares the answers of a group; use at least 2, or "
            "--trainer.advantage.estimator reinforce_pp",
        )


def _check_family(name: str) -> None:
    from miles_rollout.tasks.gym import check_family  # only runs that use reasoning-gym need it

    try:
        check_family(name)
    except InvalidFieldError as error:
        raise InvalidFieldError("task.dataset", name, error.remedy) from None
    except ImportError as error:
        raise InvalidFieldError("task.source", "reasoning_gym", str(error)) from error


def _check_program(config: EvaluationConfig) -> None:
    """Without this, a program that is not there would only show as points that are missing."""
    if not config.command or "{" in config.command[0]:  # a program inside the snapshot is not there yet
        return
    if shutil.which(config.command[0]) is None:
        raise InvalidFieldError(
            "evaluation.command",
            config.command[0],
            "there is no such program here, or it may not be executed; install it, or give its whole path",
        )


def _require_file(field: str, path: Path) -> None:
    try:
        path.stat()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise InvalidFieldError(field, str(path), f"cannot be read: {error.strerror}") from error
