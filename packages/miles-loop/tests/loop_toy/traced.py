"""`python -m loop_toy.traced eval --json`: the fast toy, which also prints the names of the options that were read."""

from __future__ import annotations

import json
import sys
from typing import Any

from loop_toy import fast
from miles_loop import evaluation_session, machine, preflight
from miles_loop.config import RunConfig
from miles_loop.config.section import Section
from miles_loop.options import section_of

_read: set[str] = set()


def _paths(model: type[Any], prefix: str = "") -> dict[tuple[type[Any], str], str]:
    found: dict[tuple[type[Any], str], str] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        below = {} if section is None else _paths(section, f"{prefix}{name}.")
        found |= below if section is not None else {(model, name): f"{prefix}{name}"}
    return found


def main() -> int:
    """Run the command; only what is read once the configuration is made counts."""
    paths, plain = _paths(RunConfig), Section.__getattribute__

    def reading(self: Section, name: str) -> Any:
        path = paths.get((type(self), name))
        if path is not None:
            _read.add(path)
        return plain(self, name)

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            Section.__getattribute__ = reading  # type: ignore[method-assign]
            return function(*args, **kwargs)

        return call

    preflight.check_eval = counted(preflight.check_eval)
    machine.check_machine = counted(machine.check_machine)
    evaluation_session.evaluate_model = counted(evaluation_session.evaluate_model)
    status = fast.recipe.main()
    Section.__getattribute__ = plain  # type: ignore[method-assign]
    sys.stdout.write(json.dumps(sorted(_read)) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
