"""Writes configuration as TOML that reads back to the same value (the standard library only reads TOML)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from miles_contracts import InvalidFieldError

NONE = "none"
"""How a None is written."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def dumps(value: BaseModel | Mapping[str, Any]) -> str:
    """TOML text of a nested mapping or model.

    TOML has no null: a None is left out where it is the default anyway, and is the text "none" elsewhere (which
    reading turns back, see `miles_loop.options.build`).

    Raises:
        InvalidFieldError: a value that TOML cannot hold.
    """
    mapping = _plain(value) if isinstance(value, BaseModel) else value
    lines: list[str] = []
    _table(mapping, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _plain(model: BaseModel) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            plain[name] = _plain(value)
        elif value is None and field.default is not None:
            plain[name] = NONE
        else:
            plain[name] = value
    return plain


def _table(mapping: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {k: v for k, v in mapping.items() if v is not None and not isinstance(v, Mapping)}
    tables = {k: v for k, v in mapping.items() if isinstance(v, Mapping)}
    if path and (plain or not tables):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_value(item, (*path, key))}" for key, item in plain.items()]
    for key, item in tables.items():
        _table(item, (*path, key), lines)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _string(key)


def _string(text: str) -> str:
    def escape(c: str) -> str:
        if c in _ESCAPES:
            return _ESCAPES[c]
        return f"\\u{ord(c):04X}" if ord(c) < 0x20 or ord(c) == 0x7F else c

    return '"' + "".join(escape(c) for c in text) + '"'


def _value(value: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return _value(value.value, path)
    if isinstance(value, (str, Path)):
        return _string(str(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else {"inf": "inf", "-inf": "-inf"}.get(repr(value), "nan")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k)} = {_value(v, (*path, k))}" for k, v in value.items() if v is not None)
        return "{" + inner + "}"
    raise InvalidFieldError(".".join(path), type(value).__name__, "TOML holds text, numbers, booleans, lists, tables")
