"""What is wrong with a command line, told in one line: option, value, remedy."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pydantic import ValidationError

from miles_contracts import InvalidFieldError

BAD_INPUT = 2
"""Exit status of a command that was given something wrong."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a wrong option with one line instead of the list of all options."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def first_problem(error: ValidationError) -> InvalidFieldError:
    """The first problem that pydantic found, as field, value and remedy."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidFieldError):
        return InvalidFieldError(field, first["input"], cause.remedy)
    return InvalidFieldError(field, first["input"], first["msg"].replace("Input should be", "must be", 1))


def print_problem(parser: argparse.ArgumentParser, error: InvalidFieldError, options: dict[str, str]) -> int:
    """Print the line and return the exit status.

    Args:
        parser: of the command; a field that has an option of the same name is called by it.
        error: what is wrong.
        options: options of fields that are named otherwise.
    """
    option = options.get(error.field, "--" + error.field.replace("_", "-"))
    known = any(option in action.option_strings for action in parser._actions)
    told = InvalidFieldError(option if known else error.field, error.value, error.remedy)
    print(f"{parser.prog}: {told}", file=sys.stderr)  # noqa: T201 (a command talks to its user)
    return BAD_INPUT
