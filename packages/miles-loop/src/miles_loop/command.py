"""The command of a recipe: `miles-<family> train | eval | export`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from miles_contracts import MilesError
from miles_loop import toml
from miles_loop.arguments import Flag, Parsed, config_for, parse
from miles_loop.recipe import Recipe

TRAIN_FLAGS = (
    Flag("config", "FILE", "TOML file with any of the options below, as tables"),
    Flag("resume", "RUN", "continue the run in this folder from its newest checkpoint"),
    Flag("dry-run", "", "print the effective configuration as TOML and stop"),
    Flag("plain", "", "print plain lines instead of the live display"),
    Flag("help", "", "show this help and stop"),
)

Command = Callable[[Sequence[str] | None], int]


def build_command(recipe: Recipe) -> Command:
    """The main function of the recipe's command; it returns the exit status (0 good, 1 failed, 2 bad input)."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(recipe, list(sys.argv[1:] if argv is None else argv))

    return main


def run_command(recipe: Recipe, argv: list[str]) -> int:
    """Run one command line of a recipe."""
    parsed = parse(argv[1:], TRAIN_FLAGS)
    try:
        return _train(recipe, parsed)
    except MilesError as error:
        sys.stderr.write(f"{recipe.command}: {error}\n")
        return 2


def _train(recipe: Recipe, parsed: Parsed) -> int:
    config = config_for(recipe, parsed)
    if "dry-run" in parsed.flags:
        sys.stdout.write(toml.dumps(config))
        return 0
    raise NotImplementedError
