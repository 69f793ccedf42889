"""The Qwen3 recipe: model, tokenizer, tasks and hardware targets, and the command miles-qwen3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_qwen3.recipe import RECIPE

__all__ = ["RECIPE"]


def __getattr__(name: str) -> Any:
    """The recipe, imported on first use (see `miles_qwen3.cli`)."""
    if name != "RECIPE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miles_qwen3.recipe import RECIPE

    return RECIPE
