"""Makes weight updates: objectives, corrections, packing, optimiser and training backends.

Nothing heavy is imported until it is used: the configuration needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_trainer.backend import TorchBackend
    from miles_trainer.config import TrainerConfig
    from miles_trainer.errors import CheckpointError, NonFiniteError, NonFiniteReport
    from miles_trainer.trainer import Trainer

_HOMES = {
    "CheckpointError": "errors",
    "NonFiniteError": "errors",
    "NonFiniteReport": "errors",
    "TorchBackend": "backend",
    "Trainer": "trainer",
    "TrainerConfig": "config",
}

__all__ = ["CheckpointError", "NonFiniteError", "NonFiniteReport", "TorchBackend", "Trainer", "TrainerConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
