"""Every leaf of the configuration is an option: its dotted name, type, default and meaning, and how text becomes it.

Layers are nested dictionaries; later ones win key by key. Nothing unknown is ever ignored: an unknown key is refused
with the nearest known name, and a value that does not fit is refused with field, value and remedy.
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from miles_contracts import InvalidFieldError
from miles_loop.names import nearest
from miles_loop.toml import NONE

M = TypeVar("M", bound=BaseModel)
Layer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of a configuration model.

    Attributes:
        path: dotted name, for example `trainer.optimizer.lr`.
        annotation: the Python type.
        default: default value; `...` when the value is required.
        description: what it means.
    """

    path: str
    annotation: Any
    default: Any
    description: str

    @property
    def is_table(self) -> bool:
        """True for a free dictionary: any deeper dotted name is accepted below it."""
        return any(get_origin(t) in (dict, Mapping) or t is dict for t in _alternatives(self.annotation))

    @property
    def is_list(self) -> bool:
        """True when it takes several values."""
        return any(get_origin(t) in (tuple, list) for t in _alternatives(self.annotation))

    @property
    def type_name(self) -> str:
        """The type in words for help and reference."""
        return type_name(self.annotation)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; Annotated is looked through."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(t for a in get_args(annotation) for t in _alternatives(a))
    return (annotation,)


def type_name(annotation: Any) -> str:
    """`int`, `retract | in_place | abort`, `list of str`, `path or none` ..."""
    names: list[str] = []
    optional = False
    for kind in _alternatives(annotation):
        if kind is type(None):
            optional = True
        elif get_origin(kind) is typing.Literal:
            names.append(" | ".join(str(v) for v in get_args(kind)))
        elif isinstance(kind, type) and issubclass(kind, Enum):
            names.append(" | ".join(str(member.value) for member in kind))
        elif get_origin(kind) in (tuple, list):
            inner = [a for a in get_args(kind) if a is not Ellipsis]
            names.append(f"list of {type_name(inner[0])}" if inner else "list")
        elif get_origin(kind) in (dict, Mapping) or kind is dict:
            names.append("table")
        else:
            names.append({"Path": "path", "float": "number"}.get(kind.__name__, kind.__name__))
    return " or ".join([*dict.fromkeys(names), *(["none"] if optional else [])])


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The nested model of a field, None for a leaf."""
    for kind in _alternatives(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def options(model: type[BaseModel], default: BaseModel | None = None, prefix: str = "") -> list[Option]:
    """All leaves of a model in the order they are declared; a section's default instance gives its leaves' defaults."""
    found: list[Option] = []
    for name, field in model.model_fields.items():
        value = getattr(default, name) if default is not None else field.get_default(call_default_factory=True)
        path = f"{prefix}{name}"
        section = section_of(field)
        if section is not None:
            found += options(section, value if isinstance(value, BaseModel) else None, f"{path}.")
        else:
            leaf = ... if default is None and field.is_required() else value
            description = " ".join((field.description or "").split())
            found.append(Option(path, field.annotation, leaf, description))
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The layer that a configuration file holds.

    Raises:
        InvalidFieldError: the file cannot be read or is not TOML (with line and column).
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidFieldError("--config", str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidFieldError("--config", str(path), f"not TOML: {error}") from error


def merge(*layers: Layer) -> dict[str, Any]:
    """Nested dictionaries merged key by key, later layers win; the layers are left as they are."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            if isinstance(value, Mapping):
                merged[key] = merge(old if isinstance(old, Mapping) else {}, value)
            else:
                merged[key] = value
    return merged


def nest(path: str, value: Any) -> dict[str, Any]:
    """`a.b.c`, v -> {"a": {"b": {"c": v}}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return typing.cast("dict[str, Any]", value)


def find_option(known: Iterable[Option], path: str) -> Option:
    """The option that a dotted name means.

    Raises:
        InvalidFieldError: unknown name; the nearest known one is suggested.
    """
    table = {option.path: option for option in known}
    if path in table:
        return table[path]
    for option in table.values():
        if option.is_table and path.startswith(f"{option.path}."):
            return option
    raise unknown_name(f"--{path}", path, table)


def unknown_name(field: str, name: str, known: Iterable[str]) -> InvalidFieldError:
    """The error for a name that does not exist; it suggests the closest one, whole or by its last part."""
    paths = list(known)
    hint = nearest(name, paths)
    if not hint:
        last = {path.rsplit(".", 1)[-1]: path for path in paths}
        close = nearest(name.rsplit(".", 1)[-1], last)
        hint = f"did you mean {last[close.split(chr(39))[1]]!r}? " if close else ""
    return InvalidFieldError(field, name, f"{hint}no option has this name; --help lists all")


def parse_text(option: Option, path: str, text: str) -> Any:
    """The value that command-line text stands for; what pydantic reads from text itself stays text.

    Lists are comma separated or JSON; `none` is None where the type allows it; values below a free table are
    TOML literals where they parse as one, and text otherwise.
    """
    kinds = _alternatives(option.annotation)
    if type(None) in kinds and text.lower() == NONE:
        return None
    if option.is_table:
        if path == option.path:
            return _json(path, text, "give a JSON object, or set single keys with more dots")
        return _literal(text)
    if option.is_list:
        if text.startswith("["):
            return _json(path, text, "give a JSON list or comma separated values")
        return [part.strip() for part in text.split(",")] if text else []
    return text


def _json(path: str, text: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidFieldError(f"--{path}", text, f"{remedy} ({error.msg})") from error


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(model: type[M], layers: Iterable[Layer]) -> M:
    """The model made of merged layers.

    Raises:
        InvalidFieldError: the first problem, with field, value and remedy (all problems when there are several).
    """
    known = options(model)
    merged = _checked(known, merge(*layers), "")
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        raise explain(error, known) from error


def _checked(known: list[Option], layer: Layer, prefix: str) -> dict[str, Any]:
    """The layer with unknown names refused and the text `none` made None where the type allows it."""
    checked: dict[str, Any] = {}
    for key, value in layer.items():
        path = f"{prefix}{key}"
        below = [o for o in known if o.path.startswith(f"{path}.")]
        if isinstance(value, Mapping) and below:
            checked[key] = _checked(known, value, f"{path}.")
        elif below:
            raise InvalidFieldError(path, value, f"this is a section; set its keys, for example {below[0].path}")
        else:
            option = find_option_for_key(known, path)
            none = value == NONE and type(None) in _alternatives(option.annotation)
            checked[key] = None if none else value
    return checked


def find_option_for_key(known: list[Option], path: str) -> Option:
    """`find_option` for a key of a file: the field is named without dashes."""
    try:
        return find_option(known, path)
    except InvalidFieldError as error:
        raise InvalidFieldError(path, path, error.remedy) from None


def _value_at(layer: Any, path: str) -> Any:
    """What nested mappings hold under a dotted name, None when they do not."""
    for part in path.split("."):
        layer = layer.get(part) if isinstance(layer, Mapping) else None
    return layer


def explain(error: ValidationError, known: Iterable[Option]) -> InvalidFieldError:
    """The error of the house for pydantic's: field, value and remedy of the first problem, the rest as lines."""
    table = {option.path: option for option in known}
    found: list[InvalidFieldError] = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"] if not str(part).startswith("function-"))
        message = item["msg"].removeprefix("Value error, ")
        option = table.get(path) or table.get(path.rsplit(".", 1)[0])
        expected = f" (expected: {option.type_name})" if option is not None else ""
        if item["type"] == "missing":
            found.append(InvalidFieldError(path, None, f"required; set --{path}{expected}"))
        elif item["type"] == "value_error" and ": " in message and isinstance(item["input"], Mapping):
            leaf, _, remedy = message.partition(": ")
            found.append(InvalidFieldError(f"{path}.{leaf}".lstrip("."), _value_at(item["input"], leaf), remedy))
        else:
            found.append(InvalidFieldError(path, item["input"], f"{message[:1].lower()}{message[1:]}{expected}"))
    first = found[0]
    more = "".join(f"\n{other}" for other in found[1:])
    return InvalidFieldError(first.field, first.value, first.remedy + more)
