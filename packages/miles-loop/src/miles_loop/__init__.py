"""Composes a run: configuration, processes, driver, run folder, checkpoints and command line.

Recipes import from here. Everything but the recipe's own vocabulary is loaded on first use, so that a command line
answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from miles_loop.recipe import HardwareTarget, ModelPreset, Recipe, TaskPreset

if TYPE_CHECKING:
    from miles_loop.command import build_command
    from miles_loop.config import RunConfig

_LAZY = {
    "RunConfig": "miles_loop.config",
    "build_command": "miles_loop.command",
}

__all__ = ["HardwareTarget", "ModelPreset", "Recipe", "RunConfig", "TaskPreset", "build_command"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
