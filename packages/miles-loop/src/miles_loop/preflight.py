"""What can be refused before a run's folder is made: files that are not there, values that contradict each other."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from miles_contracts import InvalidFieldError
from miles_loop.config import (
    EvaluationConfig,
    EvaluationMode,
    RunConfig,
    RuntimeKind,
    TaskConfig,
    TaskSourceKind,
    TransportKind,
)
from miles_loop.models import check_model_folder
from miles_loop.recipe import Recipe
from miles_loop.scoring import check_reward
from miles_loop.sglang_engine import check_model as check_served_right
from miles_rollout.engine_identity import EngineKind
from miles_trainer.config import ObjectiveKind


def check_run(recipe: Recipe, config: RunConfig) -> None:
    """Refuse what cannot be trained, at the cost of a few looks at the disk.

    Raises:
        InvalidFieldError: naming field, value and remedy.
    """
    _check_groups(config)
    _check_task(config.task)
    _check_shared_memory(config)
    _check_urls("engine.urls", config.engine.urls)
    _check_program(config.evaluation)
    _check_dedicated(config)
    _check_model(recipe, config, starts_engines=not config.engine.urls or starts_dedicated(config))


def check_eval(recipe: Recipe, config: RunConfig) -> None:
    """Refuse what cannot be measured by `eval`, at the cost of a few looks at the disk.

    Raises:
        InvalidFieldError: naming field, value and remedy.
    """
    _check_task(config.task)
    if not config.task.eval_size:
        raise InvalidFieldError("task.eval_size", 0, "nothing is held out that could be measured; use a value > 0")
    _check_urls("engine.urls", config.engine.urls)
    _check_model(recipe, config, starts_engines=not config.engine.urls)


def starts_dedicated(config: RunConfig) -> bool:
    """Whether the run starts engines that only measure."""
    return config.evaluation.mode is EvaluationMode.DEDICATED and not config.evaluation.urls


def _check_task(task: TaskConfig) -> None:
    for field, reward in (("task.reward", task.reward), ("task.eval_reward", task.eval_reward)):
        if reward is not None:
            check_reward(reward, field)
    if task.source is TaskSourceKind.JSONL:
        for field, path in (("task.path", task.path), ("task.eval_path", task.eval_path)):
            if path is not None:
                _require_file(field, path)
    elif task.source is TaskSourceKind.REASONING_GYM:
        _check_family(str(task.dataset))


def _check_shared_memory(config: RunConfig) -> None:
    """On this machine; on a cluster each node is asked before anything starts there."""
    sync = config.sync
    if sync.transport is not TransportKind.LOCAL or config.runtime.kind is not RuntimeKind.LOCAL:
        return
    if not os.access(sync.directory, os.W_OK | os.X_OK) or not sync.directory.is_dir():
        remedy = "weights travel through files there: give an existing folder that may be written, such as /dev/shm"
        raise InvalidFieldError("sync.directory", str(sync.directory), remedy)


def _check_model(recipe: Recipe, config: RunConfig, *, starts_engines: bool) -> None:
    """What the recipe makes itself is not looked at."""
    if recipe.model_named(config.model) is not None:
        return
    model = Path(config.model)
    check_model_folder(model, [known.name for known in recipe.models])
    if starts_engines and config.engine.kind is EngineKind.SGLANG:
        check_served_right(model)


def _check_dedicated(config: RunConfig) -> None:
    """Without this, engines that cannot measure would only show as points that are missing."""
    if config.evaluation.mode is not EvaluationMode.DEDICATED:
        return
    if not config.task.eval_size:
        remedy = "nothing is held out for evaluation.mode dedicated; use a value > 0, or leave evaluation.mode out"
        raise InvalidFieldError("task.eval_size", 0, remedy)
    _check_urls("evaluation.urls", config.evaluation.urls)
    trains = {url.rstrip("/") for url in config.engine.urls}
    for url in config.evaluation.urls:
        if url.rstrip("/") in trains:
            remedy = "engine.urls names it too: it would train with the weights of snapshots; name another engine"
            raise InvalidFieldError("evaluation.urls", url, remedy)


def _check_urls(field: str, urls: Sequence[str]) -> None:
    seen: set[str] = set()
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # a port that is none
            good = False
        if not good:
            raise InvalidFieldError(field, url, "give the URL of an engine, like http://127.0.0.1:30000")
        if url.rstrip("/") in seen:
            raise InvalidFieldError(field, url, "it is named twice; name each engine once")
        seen.add(url.rstrip("/"))


def _check_groups(config: RunConfig) -> None:
    """A group of one says nothing to an estimator that compares; `no_signal` has its own answer to it. A rank without
    an answer does nothing."""
    answers = config.rollout.groups_per_step * config.rollout.group_size
    if config.runtime.trainer_ranks > answers:
        remedy = f"a batch has {answers} answers, and a rank without any trains nothing; use at most {answers}"
        raise InvalidFieldError("runtime.trainer_ranks", config.runtime.trainer_ranks, remedy)
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
