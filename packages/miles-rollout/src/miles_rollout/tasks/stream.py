"""A task stream is a pure function of its ordinal, so resuming it is exact and re-issuing a prompt needs no storage.

The stream repeats a finite set of items for ever. Ordinal k belongs to epoch k // size, and each epoch visits
the items in its own seeded order. The order is made of 64-bit integer arithmetic only, so that it is the same
under every version of Python and numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError, Task

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TaskSource(Protocol):
    """An endless stream of tasks with exact resumable state."""

    @property
    def size(self) -> int:
        """Items in one epoch."""
        ...

    def next(self) -> Task:
        """The task at the current ordinal; the ordinal moves on."""
        ...

    def at(self, prompt_index: int) -> Task:
        """The task at any ordinal, without moving."""
        ...

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON-like values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; refused when the data differs."""
        ...


class TaskStream(ABC):
    """Shuffled epochs over the items of a subclass, which supplies `_task` and `_fingerprint`."""

    def __init__(self, *, size: int, seed: int, shuffle: bool) -> None:
        if size < 1:
            raise InvalidFieldError("size", size, "a task source needs at least one item")
        if seed < 0:
            raise InvalidFieldError("seed", seed, "use a seed >= 0")
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._next = 0

    @abstractmethod
    def _task(self, item: int, prompt_index: int) -> Task:
        """The task made of item `item`, under the ordinal `prompt_index`."""

    @abstractmethod
    def _fingerprint(self) -> str:
        """A digest of the items; equal exactly when the data is."""

    @property
    def size(self) -> int:
        """Items in one epoch."""
        return self._size

    def at(self, prompt_index: int) -> Task:
        """The task at ordinal `prompt_index`."""
        if prompt_index < 0:
            raise InvalidFieldError("prompt_index", prompt_index, "ordinals start at 0")
        epoch, position = divmod(prompt_index, self._size)
        item = int(epoch_order(self._size, self._seed, epoch)[position]) if self._shuffle else position
        return self._task(item, prompt_index)

    def next(self) -> Task:
        """The next task of the stream."""
        task = self.at(self._next)
        self._next += 1
        return task

    def state(self) -> dict[str, Any]:
        """Position and identity of the stream."""
        return {
            "next": self._next,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": self._size,
            "fingerprint": self._fingerprint(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            InvalidFieldError: the data, its order or its size is not the one the state was taken from.
        """
        mine = self.state()
        for field in ("fingerprint", "size", "seed", "shuffle"):
            if state.get(field) != mine[field]:
                raise InvalidFieldError(
                    f"task source {field}",
                    state.get(field),
                    f"the data of this run is {mine[field]!r}; resume with the same data, or start a new run",
                )
        position = state.get("next")
        if not isinstance(position, int) or position < 0:
            raise InvalidFieldError("task source next", position, "the saved position is an integer >= 0")
        self._next = position


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters neighbours."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which epoch `epoch` visits `size` items: int64 [size], a permutation."""
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(epoch % 2**64) * _GOLDEN
        keys = _mix(_mix(start) + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order
