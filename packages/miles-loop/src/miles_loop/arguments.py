"""From a command line to a configuration: which words are options, and which layers they make.

    miles-qwen3 train --hardware cpu --config my.toml --steps 50 --trainer.optimizer.lr 1e-5

The values of a list stand behind each other, or with commas: `--rollout.engines http://a:30000 http://b:30000`.
An option is `--name value` or `--name=value`; dashes and underscores in names are the same. A boolean option may
stand alone (`--record.plot` is true). Common options are short names of dotted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError
from miles_loop.config import RunConfig, RuntimeKind, TransportKind
from miles_loop.names import nearest
from miles_loop.options import Layer, Option, build, find_option, merge, nest, options, parse_text, read_toml
from miles_loop.recipe import Recipe
from miles_rollout.engine_identity import EngineKind

SHORT_NAMES: Mapping[str, str] = {
    "hardware": "hardware",
    "model": "model",
    "task": "task.preset",
    "run-dir": "run_dir",
    "steps": "steps",
    "seed": "seed",
    "pipeline-depth": "pipeline_depth",
    "checkpoint-every": "checkpoint.every",
    "runtime": "runtime.kind",
    "address": "runtime.ray.address",
    "trainer.ranks": "runtime.trainer_ranks",
    "rollout.workers": "runtime.rollout_workers",
    "rollout.engine": "engine.kind",
    "rollout.engines": "engine.urls",
}
"""Common options and the dotted options they stand for."""


_SLIP = 0.85
"""Likeness to an option of the command from which on one of another command may be a slip of the finger."""
GYM_PREFIX = "reasoning_gym:"
"""`--task reasoning_gym:NAME` is the family NAME of reasoning-gym."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of the command itself, not of the configuration. `value` names its argument, "" for none."""

    name: str
    value: str
    help: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a command line says: settings of the configuration, the command's own flags, and plain words."""

    settings: dict[str, Any]
    flags: dict[str, str]
    words: tuple[str, ...]


def everything(path: str) -> bool:
    """Every option of the configuration is used."""
    return True


def parse(
    argv: Sequence[str],
    flags: Sequence[Flag],
    uses: Callable[[str], bool] = everything,
    foreign: Mapping[str, str] | None = None,
) -> Parsed:
    """Split a command line.

    Args:
        argv: the words.
        flags: the command's own.
        uses: whether the command has a use for the option of this dotted name; others are refused.
        foreign: flags of other commands and what to say of them.

    Raises:
        InvalidFieldError: unknown option (nearest name suggested), missing value, or a repeated option.
    """
    known = options(RunConfig)
    used = [option for option in known if uses(option.path)]
    if len(used) == len(known):
        return split_words(argv, flags, known, SHORT_NAMES, foreign)
    unused = {option.path: "it is about training, and has no influence here; leave it out" for option in known}
    unused = {path: text for path, text in unused.items() if not uses(path)}
    unused |= {name: unused[path] for name, path in SHORT_NAMES.items() if path in unused}
    return split_words(argv, flags, used, short_names(uses), unused | dict(foreign or {}))


def short_names(uses: Callable[[str], bool]) -> dict[str, str]:
    """Common options of a command and the dotted ones they stand for."""
    return {name: path for name, path in SHORT_NAMES.items() if uses(path)}


def split_words(
    argv: Sequence[str],
    flags: Sequence[Flag],
    known: Sequence[Option],
    short: Mapping[str, str],
    foreign: Mapping[str, str] | None = None,
) -> Parsed:
    """`parse` for the options of any configuration.

    Args:
        argv: the words.
        flags: the command's own.
        known: options of the configuration.
        short: common options and the dotted ones they stand for.
        foreign: names that exist elsewhere, and what to say of them.

    Raises:
        InvalidFieldError: as `parse`.
    """
    own = {flag.name: flag for flag in flags}
    settings: dict[str, Any] = {}
    seen_flags: dict[str, str] = {}
    words: list[str] = []
    rest = list(argv)
    seen: set[str] = set()
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if name.replace("_", "-") in own:
            flag = own[name.replace("_", "-")]
            seen_flags[flag.name] = _argument(word, text, equals, rest) if flag.value else "true"
            continue
        path = short.get(name.replace("_", "-"), name.replace("-", "_"))
        remedy = (foreign or {}).get(name.replace("_", "-")) or (foreign or {}).get(path)
        if remedy is not None:
            slip = nearest(name, [*own, *short], _SLIP)
            raise InvalidFieldError(f"--{name}", text or _next_value(rest), f"{slip}{remedy}")
        option = _find(known, name, path, [*own, *short])
        if path in seen:
            raise InvalidFieldError(f"--{name}", text or _next_value(rest), "given twice; keep one")
        seen.add(path)
        if option.annotation is bool and not equals and (not rest or rest[0].startswith("--")):
            value: Any = True
        else:
            value = parse_text(option, path, _argument(word, text, equals, rest))
            while option.is_list and not equals and rest and not rest[0].startswith("--"):
                value = [*value, *parse_text(option, path, rest.pop(0))]
        settings = merge(settings, nest(path, value))
    return Parsed(settings, seen_flags, tuple(words))


def _find(known: Sequence[Option], name: str, path: str, other_names: Sequence[str]) -> Option:
    """`find_option` that also suggests the short names."""
    try:
        return find_option(known, path)
    except InvalidFieldError:
        from miles_loop.options import unknown_name

        raise unknown_name(f"--{name}", name, [*other_names, *(o.path for o in known)]) from None


def _next_value(rest: Sequence[str]) -> str | None:
    """The value that stands behind an option, as far as one can tell without knowing it."""
    return rest[0] if rest and not rest[0].startswith("--") else None


def _argument(word: str, text: str, equals: str, rest: list[str]) -> str:
    if equals:
        return text
    if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
        raise InvalidFieldError(word, None, f"needs a value: {word} VALUE")
    return rest.pop(0)


def layers_for(recipe: Recipe, file: Layer, settings: Layer) -> list[Layer]:
    """All layers of a run in their order, the presets chosen by file or command line included.

    Raises:
        InvalidFieldError: an unknown hardware target or task, with the nearest name.
    """
    chosen = merge({"hardware": recipe.hardware[0].name, "model": recipe.models[0].name}, file, settings)
    target = recipe.hardware_named(str(chosen["hardware"]))
    # A target may bring its own default model and task (a 32B model on eight GPUs, say).
    chosen = merge({"hardware": target.name, "model": recipe.models[0].name}, target.overrides, file, settings)
    task = task_layer(recipe, chosen.get("task", {}))
    # So may a task, which gives way to a target.
    own = {"model": task["model"]} if "model" in task else {}
    chosen = merge({"model": recipe.models[0].name}, own, target.overrides, file, settings)
    model = recipe.model_named(str(chosen["model"]))
    layers = [
        {"recipe": recipe.family, "model": str(chosen["model"])},
        recipe.defaults,
        model.overrides if model is not None else {},
        task,
        target.overrides,
        file,
        merge(settings, {"task": {"preset": task["task"].get("preset")}}),
    ]

    return [_engine_layer(merge(*layers)), *layers]


def _engine_layer(chosen: Layer) -> Layer:
    """What goes without saying with a kind of engine: a broadcast reaches SGLang wherever it runs."""
    engine = chosen.get("engine", {})
    sglang = isinstance(engine, Mapping) and engine.get("kind") == EngineKind.SGLANG
    return {"sync": {"transport": TransportKind.BROADCAST.value}} if sglang else {}


def task_layer(recipe: Recipe, chosen: Any) -> dict[str, Any]:
    """The preset's values; a word that ends in .jsonl is a file of prompts, `reasoning_gym:NAME` a family with its own
    verifier as the reward; no preset when a source is named."""
    if not isinstance(chosen, Mapping):
        raise InvalidFieldError("task", chosen, "this is a section; set task.preset, or give --task NAME")
    name = chosen.get("preset")
    if isinstance(name, str) and name.endswith(".jsonl"):
        return {"task": {"source": "jsonl", "path": name, "name": Path(name).stem, "preset": None}}
    if isinstance(name, str) and name.startswith(GYM_PREFIX):
        family = name.removeprefix(GYM_PREFIX)
        gym = {"source": "reasoning_gym", "dataset": family, "name": family, "reward": "verifier", "preset": None}
        return {"task": gym}
    if name is None and ("path" in chosen or "dataset" in chosen):
        source = chosen.get("source", "jsonl" if "path" in chosen else "reasoning_gym")
        default = chosen.get("dataset") or Path(str(chosen.get("path", "task"))).stem
        return {"task": {"source": source, "name": default, "preset": None}}
    preset = recipe.tasks[0] if name is None else recipe.task_named(str(name))
    return merge(preset.overrides, {"task": {"preset": preset.name}})


def config_for(recipe: Recipe, parsed: Parsed) -> RunConfig:
    """The configuration that a `train` or `eval` command line asks for.

    Raises:
        InvalidFieldError: naming field, value and remedy.
    """
    file = read_toml(Path(parsed.flags["config"])) if "config" in parsed.flags else {}
    config = build(RunConfig, layers_for(recipe, file, parsed.settings))
    # Only asked of a new run: one that is continued elsewhere may keep the address of the cluster it was on.
    if config.runtime.ray.address is not None and config.runtime.kind is not RuntimeKind.RAY:
        remedy = "it names a Ray cluster; choose --runtime ray, or leave it out"
        raise InvalidFieldError("runtime.ray.address", config.runtime.ray.address, remedy)
    return config
