"""The umbrella command: `miles recipes | report | plan | doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from miles_contracts import InvalidFieldError, MilesError
from miles_loop.names import nearest
from miles_loop.recipe import Recipe

GROUP = "miles.recipes"
"""Entry-point group in which packages announce their recipes."""

COMMANDS = ("recipes", "report", "plan", "doctor")

USAGE = """usage: miles COMMAND

  miles recipes             list the installed recipes and their commands
  miles report RUN [--json] show what a run has achieved, also while it runs; several runs side by side
  miles plan [options]      predict step time, staleness and idle shares of a run; miles plan --help
  miles doctor [--json]     check this machine

A recipe brings its own command, for example: miles-qwen3 train --hardware cpu
"""

PAGES = {
    "report": """usage: miles report RUN [RUN ...] [--json]

Shows what the run in the folder RUN has achieved, also while it runs: how it stands or why it ended, rewards and
evaluations, what was dropped, the audit of its tokens. Several runs stand side by side.

  RUN               folder of a run (train --run-dir RUN)
  --json            print one JSON object, or a list of them for several runs

examples:
  miles report runs/first
  miles report runs/first --json
  miles report runs/first runs/second
""",
    "doctor": """usage: miles doctor [--json]

Checks this machine: what is installed, processors, memory, shared memory, and what makes runs slow. The exit status
is 1 when something would keep a run from working.

  --json            print one JSON object
""",
    "recipes": """usage: miles recipes

Lists the installed recipes: their commands, models, tasks and hardware targets.
""",
}
"""`--help` of the commands that take next to no options."""


def load_recipes() -> tuple[list[Recipe], list[str]]:
    """The recipes of the installed packages in order of their names, and what could not be loaded."""
    found: list[Recipe] = []
    problems: list[str] = []
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        try:
            recipe = point.load()
        except (ImportError, AttributeError) as error:
            problems.append(f"{point.name} ({point.value}): {error}")
            continue
        if isinstance(recipe, Recipe):
            found.append(recipe)
        else:
            problems.append(f"{point.name} ({point.value}): not a Recipe")
    return found, problems


def _recipes() -> int:
    recipes, problems = load_recipes()
    for recipe in recipes:
        sys.stdout.write(f"{recipe.command}: {recipe.summary}\n")
        for title, items in (("models", recipe.models), ("tasks", recipe.tasks), ("hardware", recipe.hardware)):
            sys.stdout.write(f"  {title:<9} {', '.join(item.name for item in items)}\n")
    for problem in problems:
        sys.stderr.write(f"miles: cannot load recipe {problem}\n")
    if not recipes and not problems:
        sys.stdout.write("no recipes are installed; try: pip install miles-qwen3\n")
    return 1 if problems else 0


def _report(words: Sequence[str], as_json: bool) -> int:
    from miles_loop import report

    if not words:
        raise InvalidFieldError("RUN", None, "give a run folder, or several to compare: miles report RUN [RUN ...]")
    found = [report.make_report(Path(word)) for word in words]
    if as_json:
        sys.stdout.write(msgspec.json.encode(found if len(found) > 1 else found[0]).decode() + "\n")
    else:
        sys.stdout.write(report.text(found[0]) if len(found) == 1 else report.comparison(found))
    return 0


def _doctor(as_json: bool) -> int:
    from miles_loop import doctor

    findings = doctor.examine()
    if as_json:
        sys.stdout.write(msgspec.json.encode(findings).decode() + "\n")
    else:
        sys.stdout.write(doctor.text(findings))
    return 1 if any(f.verdict is doctor.Verdict.BAD for f in findings) else 0


def run(argv: Sequence[str]) -> int:
    """Carry out one command line; the exit status is 0 good, 1 found something bad, 2 bad input.

    Raises:
        InvalidFieldError: unknown command or option.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    command, rest = argv[0], list(argv[1:])
    if command not in COMMANDS:
        raise InvalidFieldError("command", command, f"{nearest(command, COMMANDS)}use {', '.join(COMMANDS)}")
    if command == "plan":
        from miles_loop.plan import command as plan

        return plan.run(rest)
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(PAGES[command])
        return 0
    options = [word for word in rest if word.startswith("-")]
    allowed = () if command == "recipes" else ("--json",)
    for option in options:
        if option not in allowed:
            remedy = f"{nearest(option, allowed)}miles {command} takes {', '.join(allowed) or 'no options'}"
            raise InvalidFieldError(option, option, remedy)
    words = [word for word in rest if not word.startswith("-")]
    if command == "report":
        return _report(words, "--json" in options)
    if words:
        raise InvalidFieldError("argument", words[0], f"miles {command} takes none")
    return _recipes() if command == "recipes" else _doctor("--json" in options)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `miles`."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except MilesError as error:
        sys.stderr.write(f"miles: {error}\n")
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # a folder that may not be read, say
        if error.filename is None:
            raise
        sys.stderr.write(f"miles: {error.filename}: {error.strerror}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
