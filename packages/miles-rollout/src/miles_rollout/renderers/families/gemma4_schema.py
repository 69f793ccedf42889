"""Values and tool schemas in Gemma 4's notation: bare keys, strings between quote tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUOTE = '<|"|>'
_STANDARD = frozenset({"description", "type", "properties", "required", "nullable"})


def literal(value: Any) -> str:
    """A JSON value; keys in alphabetical order without regard to case.

    Quote tokens inside strings are taken out: they would end the string.
    """
    if value is None:
        return "null"
    if isinstance(value, str):
        return QUOTE + value.replace(QUOTE, "") + QUOTE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in _sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(literal(item) for item in value) + "]"
    return str(value)


def declaration(tool: Mapping[str, Any]) -> str:
    """The declaration of a tool, without the tokens around it."""
    function = tool.get("function", tool)
    out = f"declaration:{function.get('name', '')}{{description:{_quoted(function.get('description', ''))}"
    parameters = function.get("parameters")
    if parameters:
        out += ",parameters:{"
        if parameters.get("properties"):
            out += "properties:{" + _properties(parameters["properties"]) + "},"
        if parameters.get("required"):
            out += _required(parameters["required"]) + ","
        if parameters.get("type"):
            out += f"type:{_quoted(_upper(parameters['type']))}}}"
    return (out + "}").strip()


def _sorted(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(value.items(), key=lambda item: item[0].lower())


def _quoted(text: Any) -> str:
    return f"{QUOTE}{text}{QUOTE}"


def _upper(kind: Any) -> str:
    return str(kind if kind is not None else "").upper()


def _required(names: Any) -> str:
    return "required:[" + ",".join(_quoted(name) for name in names) + "]"


def _properties(properties: Mapping[str, Any], *, only_other_keys: bool = False) -> str:
    return ",".join(
        f"{key}:{{{_schema(schema if isinstance(schema, Mapping) else {})}}}"
        for key, schema in _sorted(properties)
        if not only_other_keys or key not in _STANDARD
    )


def _schema(schema: Mapping[str, Any]) -> str:
    kind = _upper(schema.get("type"))
    parts = []
    if schema.get("description"):
        parts.append(f"description:{_quoted(schema['description'])}")
    if kind == "STRING" and schema.get("enum"):
        parts.append(f"enum:{_plain(schema['enum'])}")
    if kind == "ARRAY" and isinstance(schema.get("items"), Mapping) and schema["items"]:
        parts.append("items:{" + ",".join(_item(key, value) for key, value in _items(schema["items"])) + "}")
    if schema.get("nullable"):
        parts.append("nullable:true")
    if kind == "OBJECT":
        if isinstance(schema.get("properties"), Mapping):
            parts.append("properties:{" + _properties(schema["properties"]) + "}")
        else:
            parts.append("properties:{" + _properties(schema, only_other_keys=True) + "}")
        if schema.get("required"):
            parts.append(_required(schema["required"]))
    parts.append(f"type:{_quoted(kind)}")
    return ",".join(parts)


def _items(items: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in _sorted(items) if value is not None]


def _item(key: str, value: Any) -> str:
    if key == "properties":
        return "properties:{" + (_properties(value) if isinstance(value, Mapping) else "") + "}"
    if key == "required":
        return _required(value)
    if key == "type":
        upper = _upper(value) if isinstance(value, str) else [_upper(kind) for kind in value]
        return f"type:{_plain(upper)}"
    return f"{key}:{_plain(value)}"


def _plain(value: Any) -> str:
    """A value inside a schema, where keys are quoted too."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_quoted(key)}:{_plain(item)}" for key, item in _sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_plain(item) for item in value) + "]"
    return literal(value)
