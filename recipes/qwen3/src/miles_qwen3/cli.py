"""The command `miles-qwen3`."""

from __future__ import annotations

from miles_loop import build_command
from miles_qwen3.recipe import RECIPE

main = build_command(RECIPE)
