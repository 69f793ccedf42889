"""Tasks from reasoning-gym: any of its families, with training and held-out items that share no seed."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, Message, Task
from miles_rollout.tasks.stream import TaskStream

_HALF = 2**30
_STRIDE = 1_000_003


class Split(StrEnum):
    """Which half of the seeds the items are drawn from."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def first_seed(seed: int, size: int, split: Split) -> int:
    """Seed of item 0. Item i uses this plus i; training stays below 2**30 and held-out at or above it."""
    base = seed * _STRIDE % (_HALF - size)
    return base + (_HALF if split is Split.HELD_OUT else 0)


class ReasoningGymTasks(TaskStream):
    """Items of one reasoning-gym family, made on demand.

    Args:
        name: the family, for example `basic_arithmetic`.
        seed: chooses the items and the order of each epoch.
        size: number of different items; an epoch visits each once.
        config: options of the family.
        split: training or held-out items.
        template: text of the user message; `{question}` is replaced.
        system_prompt: optional system message.
        shuffle: False visits the items in the order of their seeds.

    Raises:
        InvalidFieldError: unknown family (the nearest names are given) or a refused option.
        ImportError: the `tasks` extra is not installed.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        size: int = 1000,
        config: Mapping[str, Any] | None = None,
        split: Split = Split.TRAIN,
        template: str = "{question}",
        system_prompt: str | None = None,
        shuffle: bool = True,
    ) -> None:
        if not 1 <= size <= _HALF // 2:
            raise InvalidFieldError("size", size, f"use a size in [1, {_HALF // 2}]")
        if "{question}" not in template:
            raise InvalidFieldError("template", template, "it must contain {question}")
        self._name = name
        self._config = dict(config or {})
        self._template = template
        self._system = system_prompt
        self._split = Split(split)
        super().__init__(size=size, seed=seed, shuffle=shuffle)
        self._dataset = _create(name, first_seed(seed, size, self._split), size, self._config)

    @property
    def name(self) -> str:
        """The family."""
        return self._name

    def _task(self, item: int, prompt_index: int) -> Task:
        entry = self._dataset[item]
        system = () if self._system is None else (Message(role="system", content=self._system),)
        question = self._template.replace("{question}", str(entry["question"]))
        return Task(
            prompt_index=prompt_index,
            messages=(*system, Message(role="user", content=question)),
            label=entry["answer"],
            # The family's verifier may need the whole entry, so it travels with the task.
            metadata={"reasoning_gym": {"name": self._name, "config": self._config, "entry": dict(entry)}},
            source=self._name,
        )

    def _fingerprint(self) -> str:
        identity = [self._name, self._split, self._config, self._template, self._system]
        return hashlib.blake2b(msgspec.json.encode(identity, order="sorted"), digest_size=16).hexdigest()


def check_family(name: str) -> None:
    """Refuse a name that reasoning-gym does not know.

    Raises:
        InvalidFieldError: with the names that are like it.
        ImportError: reasoning-gym is not installed.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("reasoning-gym tasks need the extra: pip install 'miles-rollout[tasks]'") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        some = f"there are {len(DATASETS)} families, for example {', '.join(sorted(DATASETS)[:4])}"
        hint = f"did you mean {' or '.join(near)}?" if near else some
        raise InvalidFieldError("reasoning-gym family", name, hint)


def _create(name: str, seed: int, size: int, config: dict[str, Any]) -> Any:
    check_family(name)
    for reserved in ("seed", "size"):
        if reserved in config:
            raise InvalidFieldError(f"config.{reserved}", config[reserved], f"give {reserved} as its own argument")
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidFieldError(f"config of {name}", config, f"the family refuses it: {error}") from error
