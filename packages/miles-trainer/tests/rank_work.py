"""What the ranks of a trainer group do in the tests; functions that a rank's process can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_contracts import Group
from miles_trainer import Trainer, TrainerConfig
from miles_trainer.ranks import OneRank, Ranks

Arrays = dict[str, NDArray[Any]]
Case = tuple[Path, list[Group], dict[str, Any]]
"""Model folder, groups of a step, configuration of the trainer."""


class Outcome:
    """What a step gave.

    Attributes:
        metrics: of the step.
        gradients: that the update used, before clipping.
        weights: after the update.
    """

    def __init__(self, metrics: dict[str, float], gradients: Arrays, weights: Arrays) -> None:
        self.metrics, self.gradients, self.weights = metrics, gradients, weights


def weights_of(trainer: Trainer) -> Arrays:
    """Copies of the weights."""
    return {name: tensor.numpy().copy() for name, tensor in trainer.export_weights()}


def steps(ranks: Ranks, cases: list[Case]) -> list[Outcome]:
    """One step of each case."""
    return [_step(ranks, *case) for case in cases]


def _step(ranks: Ranks, folder: Path, groups: list[Group], config: dict[str, Any]) -> Outcome:
    trainer = Trainer(folder, TrainerConfig.model_validate(config), seed=0, ranks=ranks)
    optimizer = trainer.backend.optimizer
    seen: Arrays = {}
    apply = optimizer.step

    def watched(lr: float) -> float:
        seen.update({name: g.numpy().copy() for name, g in optimizer.gradients().items()})
        return apply(lr)

    optimizer.step = watched  # type: ignore[method-assign]
    return Outcome(trainer.train_step(groups), seen, weights_of(trainer))


def train(ranks: Ranks, folder: Path, batches: list[list[Group]], checkpoint: Path | None, save: Path) -> Arrays:
    """Several steps, from a checkpoint when one is named; saves at the end. Weights of this rank."""
    trainer = Trainer(folder, TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}}), seed=0, ranks=ranks)
    if checkpoint is not None:
        trainer.load(checkpoint)
    for groups in batches:
        trainer.train_step(groups)
    if ranks.rank == 0:
        trainer.save(save)
    return weights_of(trainer)


def noise(ranks: Ranks, folder: Path, batches: list[list[Group]]) -> list[float]:
    """A random number drawn within each step."""
    trainer = Trainer(folder, TrainerConfig(), seed=0, ranks=ranks)
    loss, drawn = trainer.backend._loss, []

    def watched(*arguments: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return loss(*arguments)

    trainer.backend._loss = watched  # type: ignore[method-assign]
    for groups in batches:
        trainer.train_step(groups)
    return drawn


def misfortune(ranks: Ranks, folder: Path, groups: list[Group], victim: int, what: str) -> list[Any]:
    """A step in which something happens to one rank, then a calm one: errors (or versions), and whether weights moved.

    Returns [error or version of the step, weights changed by it, error or version of the next step].
    """
    trainer = Trainer(folder, TrainerConfig(), seed=0, ranks=ranks)
    before = weights_of(trainer)
    loss = trainer.backend._loss
    if ranks.rank == victim:
        trainer.backend._loss = lambda *arguments: _strike(what, trainer, loss(*arguments))  # type: ignore[method-assign]
    first = _attempt(trainer, groups)
    after = weights_of(trainer)
    changed = any(not np.array_equal(before[name], after[name]) for name in before)
    trainer.backend._loss = loss  # type: ignore[method-assign]
    return [first, changed, _attempt(trainer, groups)]


def _attempt(trainer: Trainer, groups: list[Group]) -> Exception | int:
    try:
        trainer.train_step(groups)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return trainer.version


def _strike(what: str, trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
    match what:
        case "bug":
            raise KeyError("lost key")
        case "nan gradient":
            return loss * float("nan")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "bit flip":
            with torch.no_grad():
                weight = next(trainer.backend.policy.model.parameters()).view(-1)
                weight[7] = torch.nextafter(weight[7], torch.tensor(9.0))
    return loss


def nan_weight(ranks: Ranks, folder: Path, groups: list[Group]) -> Exception | int:
    """Rank 1 computes with a weight that is not a number."""
    trainer = Trainer(folder, TrainerConfig(), seed=0, ranks=ranks)
    if ranks.rank == 1:
        with torch.no_grad():
            next(trainer.backend.policy.model.parameters()).fill_(float("nan"))
    return _attempt(trainer, groups)


def alone(cases: list[Case]) -> list[Outcome]:
    """`steps` of a group of one."""
    return steps(OneRank(), cases)


def sums(ranks: Ranks, shapes: list[tuple[int, ...]], bucket_bytes: int) -> list[NDArray[Any] | None]:
    """Sums over ranks of gradients that are random, here and there missing, in float32 and float64."""
    from miles_trainer import ranks as module

    module.BUCKET_BYTES = bucket_bytes
    masters: dict[str, torch.Tensor] = {}
    for index, shape in enumerate(shapes):
        master = torch.zeros(shape, dtype=torch.float64 if index % 3 == 2 else torch.float32)
        master.grad = gradient(index, ranks.rank, shape, master.dtype)
        masters[str(index)] = master
    ranks.sum_gradients(masters)
    return [None if m.grad is None else m.grad.numpy() for m in masters.values()]


def gradient(index: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """The gradient of tensor `index` on a rank: none of tensor 1, and of every fourth only on rank 0."""
    if index == 1 or (index % 4 == 3 and rank):
        return None
    values = np.random.default_rng([index, rank]).normal(size=shape)
    return torch.tensor(values, dtype=dtype)
