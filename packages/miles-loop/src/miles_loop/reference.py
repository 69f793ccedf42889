"""The configuration reference: help text for the command line and Markdown for the documentation, from the models."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel

from miles_loop.arguments import SHORT_NAMES, Flag, Parsed, config_for, everything, short_names
from miles_loop.config import RunConfig
from miles_loop.options import Option, options, section_of
from miles_loop.recipe import Recipe

EXAMPLES = {
    "eval": (
        ("the newest checkpoint of a run, on its own held-out tasks", "eval --run runs/first"),
        ("four answers a problem, as one JSON object", "eval --run runs/first --evaluation.samples 4 --json"),
        ("a model folder on prompts of yours", "eval --model ./my-model --task prompts.jsonl --task.reward exact"),
    ),
    "export": (
        ("the model of the newest checkpoint", "export runs/first my-model"),
        ("the model after step 40", "export runs/first my-model --step 40"),
    ),
}
"""Examples of commands that all recipes share: (comment, words after the recipe's name)."""


def show_default(value: Any) -> str:
    """A default as it would be typed; `required` when there is none."""
    if value is ...:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (tuple, list)):
        return ",".join(show_default(v) for v in value) or "empty"
    return "empty" if value in ("", {}) else str(value)


def sections(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, first line of the docstring) of a model and all its sections; the model itself is ''."""
    found = [(prefix.rstrip("."), _first_line(model))]
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None:
            found += sections(section, f"{prefix}{name}.")
    return found


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _own(section: str, known: Sequence[Option]) -> list[Option]:
    prefix = f"{section}." if section else ""
    return [o for o in known if o.path.startswith(prefix) and "." not in o.path[len(prefix) :]]


def markdown() -> str:
    """The reference as Markdown: one table a section."""
    known = options(RunConfig)
    lines = ["# Configuration reference", ""]
    short = {path: name for name, path in SHORT_NAMES.items()}
    for section, description in sections():
        lines += [f"## {section or 'The run'}", "", description, "", "| option | type | default | meaning |"]
        lines.append("|---|---|---|---|")
        for option in _own(section, known):
            alias = short.get(option.path)
            name = f"`--{option.path}`" + (f", `--{alias}`" if alias and alias != option.path else "")
            kind = option.type_name.replace("|", "\\|")
            meaning = option.description.replace("|", "\\|")
            lines.append(f"| {name} | {kind} | `{show_default(option.default)}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def help_text(
    recipe: Recipe, command: str, summary: str, flags: Sequence[Flag], uses: Callable[[str], bool] = everything
) -> str:
    """`--help` of one command of a recipe, with the options that it `uses`; the defaults shown are the recipe's."""
    out = [f"usage: {recipe.command} {command} [options]", "", summary, "", "common options:"]
    plain = config_for(recipe, Parsed({}, {}, ()))
    listed = [o for o in options(RunConfig, plain) if o.path != "recipe" and uses(o.path)]
    if listed:
        known = {o.path: o for o in listed}
        for name, path in short_names(uses).items():
            out += entry(f"--{name} {placeholder(known[path])}", known[path].description, known[path].default)
    for flag in flags:
        out += entry(f"--{flag.name} {flag.value}".rstrip(), flag.help)
    if listed:
        for title, items in _presets(recipe):
            out += ["", f"{title} (the first is the default):"]
            for name, text in items:
                out += entry(name, text)
        out += ["", "all options (in a configuration file: keys of TOML tables):"]
        for section, description in sections():
            shown = _own(section, listed)
            if not shown:
                continue
            out += ["", f"  {section or 'run'}: {description}"]
            for option in shown:
                out += entry(f"--{option.path} {placeholder(option)}", option.description, option.default)
    examples = _examples(recipe, command)
    if examples:
        out += ["", "examples:"]
        for comment, line in examples:
            out += [f"  # {comment}", f"  {line}"]
    return "\n".join(out) + "\n"


def _examples(recipe: Recipe, command: str) -> list[tuple[str, str]]:
    """(comment, command line) of what a recipe shows of a command, and of what every recipe can do."""
    own = [(comment, line) for comment, line in recipe.examples if line.startswith(f"{recipe.command} {command}")]
    return own + [(comment, f"{recipe.command} {line}") for comment, line in EXAMPLES.get(command, ())]


def _presets(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(name, summary)]) of what a recipe knows by name."""
    targets = [(t.name, t.summary + (f" [needs {t.needs}]" if t.needs else "")) for t in recipe.hardware]
    return [
        ("models", [(m.name, m.summary) for m in recipe.models]),
        ("tasks", [(t.name, t.summary) for t in recipe.tasks]),
        ("hardware targets", targets),
    ]


def placeholder(option: Option) -> str:
    kind = option.type_name
    return kind.replace(" or none", "").replace(" ", "").upper() if "|" not in kind else kind.replace(" ", "")


def entry(label: str, description: str, default: Any = None) -> list[str]:
    """A label with its text beside it, or below when the label is long."""
    shown = "" if default is None or default is ... else show_default(default)
    text = f"{description} [{shown}]" if shown and shown != "empty" else description
    column = 34
    lines = textwrap.wrap(text, 116 - column, break_on_hyphens=False) or [""]
    if len(label) + 4 <= column:
        return [f"  {label:<{column - 2}}{lines[0]}", *(" " * column + line for line in lines[1:])]
    return [f"  {label}", *(" " * column + line for line in lines)]
