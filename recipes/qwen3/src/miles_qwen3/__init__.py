"""The Qwen3 recipe: model, tokenizer, tasks and hardware targets, and the command miles-qwen3."""

from miles_qwen3.recipe import RECIPE

__all__ = ["RECIPE"]
