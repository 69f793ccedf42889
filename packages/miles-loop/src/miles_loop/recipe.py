"""A recipe is data: names for models, tasks and hardware targets, and the configuration each stands for.

    RECIPE = Recipe(family="qwen3", summary="...", models=(...,), tasks=(...,), hardware=(...,), defaults={...})

`build_command(RECIPE)` makes the command `miles-qwen3` of it. Overrides are nested dictionaries in the shape of
`RunConfig` (or of its TOML file). Later ones win:

    defaults < model < task < hardware < configuration file < command line
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from miles_contracts import InvalidFieldError
from miles_loop.names import nearest

Overrides = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A model known by name.

    Attributes:
        name: what `--model` takes.
        summary: one line for `--help`.
        build: import path `pkg.mod:fn`; `fn(directory: Path, seed: int) -> None` writes a Hugging Face folder
            (config.json, model.safetensors, tokenizer files, chat template) into the existing empty `directory`.
        heavy: True when `build` imports torch or transformers, or takes long: it then runs in a process of its
            own and its result is cached (such a model must not depend on the seed). A light one is built into
            the run folder by the driver itself, which must stay free of torch.
        overrides: configuration that goes with the model.
    """

    name: str
    summary: str
    build: str
    heavy: bool = False
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPreset:
    """A task known by name: `overrides` holds at least the `task` section."""

    name: str
    summary: str
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareTarget:
    """Where a recipe runs.

    Attributes:
        name: what `--hardware` takes.
        summary: one line for `--help`.
        overrides: configuration of the target.
        needs: what has to be there first, in words; `train` refuses the target with it while it is not empty
            (`--dry-run` still prints the configuration).
    """

    name: str
    summary: str
    overrides: Overrides = field(default_factory=dict)
    needs: str = ""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model family: its command is `miles-<family>`.

    Attributes:
        family: short name, lower case.
        summary: one line for `miles recipes` and `--help`.
        models: known models; the first is the default.
        tasks: known tasks; the first is the default.
        hardware: known targets; the first is the default.
        defaults: configuration that all of them share.
        renderer: name of the renderer of the family's chat format (see `miles_rollout.renderers`).
        examples: command lines for `--help`, each with a comment above it: (comment, command).
    """

    family: str
    summary: str
    models: tuple[ModelPreset, ...]
    tasks: tuple[TaskPreset, ...]
    hardware: tuple[HardwareTarget, ...]
    defaults: Overrides = field(default_factory=dict)
    renderer: str = "auto"
    examples: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for kind in ("models", "tasks", "hardware"):
            names = [item.name for item in getattr(self, kind)]
            if not names or len(set(names)) != len(names):
                raise InvalidFieldError(f"Recipe.{kind}", names, "give at least one, with unique names")

    @property
    def command(self) -> str:
        """Name of the command."""
        return f"miles-{self.family}"

    def model_named(self, name: str) -> ModelPreset | None:
        """The preset of this name, or None when the name must be a folder."""
        return next((m for m in self.models if m.name == name), None)

    def task_named(self, name: str) -> TaskPreset:
        """The preset of this name; InvalidFieldError with the nearest name otherwise."""
        return _find(self.tasks, name, "task.preset", ", or FILE.jsonl, or reasoning_gym:NAME")

    def hardware_named(self, name: str) -> HardwareTarget:
        """The target of this name; InvalidFieldError with the nearest name otherwise."""
        return _find(self.hardware, name, "hardware")


def _find(items: Iterable[N], name: str, what: str, more: str = "") -> N:
    names = {item.name: item for item in items}
    if name in names:
        return names[name]
    raise InvalidFieldError(what, name, f"{nearest(name, names)}use one of {', '.join(names)}{more}")
