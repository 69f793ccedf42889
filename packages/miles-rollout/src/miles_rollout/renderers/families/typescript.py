"""Tool schemas as TypeScript declarations, in the two spellings that models were trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_rollout.renderers.errors import RenderError
from miles_rollout.renderers.jsontext import to_json
from miles_rollout.renderers.protocol import Tools

Schema = Mapping[str, Any]

_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("minItems", "maxItems"),
}
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}


# -- Kimi K2.5 ---------------------------------------------------------------------------------------------------------


def kimi_declarations(tools: Tools) -> str:
    """The namespace of functions that Kimi K2.5 reads.

    Raises:
        RenderError: a schema that has no form in it.
    """
    functions = [_kimi_function(tool.get("function", tool)) for tool in tools if tool.get("type") in (None, "function")]
    if not functions:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def _kimi_function(function: Schema) -> str:
    parameters: Schema = function.get("parameters") or {}
    definitions: Schema = parameters.get("$defs") or {}
    parts = []
    for name, schema in definitions.items():
        note = _comment(str(schema.get("description") or ""), "")
        parts.append(f"{note}interface {name} {_kimi_type(schema, '')}")
    if function.get("description"):
        parts.append(_comment(str(function["description"]), "").removesuffix("\n"))
    body = _kimi_object(parameters, "")
    if _refers_to_itself(parameters):
        parts.insert(0, f"interface parameters {body}")
        body = "parameters"
    parts.append(f"type {function.get('name', 'function')} = (_: {body}) => any;")
    return "\n".join(parts)


def _refers_to_itself(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("$ref") == "#" or any(_refers_to_itself(v) for v in schema.values())
    return isinstance(schema, Sequence) and not isinstance(schema, str) and any(_refers_to_itself(v) for v in schema)


def _comment(text: str, indent: str) -> str:
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""


def _kimi_type(schema: Any, indent: str) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return "parameters" if schema["$ref"] == "#" else str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " | ".join(_kimi_type(option, indent) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_UNION.get(k, "any") for k in kind)
    if kind == "object":
        return _kimi_object(schema, indent)
    if kind == "array":
        return _kimi_array(schema, indent)
    if kind is None and schema:
        raise RenderError(f"tools: the schema {to_json(dict(schema))[:80]} has no type; give it one")
    return "number" if kind == "integer" else str(kind or "any")


def _kimi_object(schema: Schema, indent: str) -> str:
    inner = indent + "  "
    properties: Schema = schema.get("properties") or {}
    required = schema.get("required") or []
    names = sorted(n for n in properties if n in required) + sorted(n for n in properties if n not in required)
    fields = []
    for name in names:
        field = properties[name]
        mark = "" if name in required else "?"
        fields.append(f"{_kimi_notes(field, inner)}{inner}{name}{mark}: {_kimi_type(field, inner)}")
    more = schema.get("additionalProperties")
    if more is not None:
        value = ("any" if more else "never") if isinstance(more, bool) else _kimi_type(more, inner)
        fields.append(f"{inner}[k: string]: {value}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _kimi_array(schema: Schema, indent: str) -> str:
    items = schema.get("items")
    if not items:
        return "Array<any>"
    inner = indent + "  "
    notes = _kimi_limits(items, inner)
    if notes:
        return f"Array<\n{notes}{inner}{_kimi_type(items, inner)}\n{indent}>"
    return f"Array<{_kimi_type(items, indent)}>"


def _kimi_limits(schema: Any, indent: str) -> str:
    """Description and limits, as comments."""
    if not isinstance(schema, Mapping):
        return ""
    out = _comment(str(schema.get("description") or ""), indent)
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type")
    allowed = _LIMITS.get(kind, ()) if plain and isinstance(kind, str) else ()
    limits = ", ".join(f"{key}: {schema[key]}" for key in sorted(allowed) if key in schema)
    return out + (f"{indent}// {limits}\n" if limits else "")


def _kimi_notes(schema: Any, indent: str) -> str:
    """Description, limits and default, as comments."""
    out = _kimi_limits(schema, indent)
    default = schema.get("default") if isinstance(schema, Mapping) else None
    if default is None:
        return out
    shown = repr(default) if isinstance(default, (int, float)) else to_json(default)
    return out + f"{indent}// Default: {shown}\n"


# -- gpt-oss -----------------------------------------------------------------------------------------------------------


def harmony_declarations(tools: Tools) -> str:
    """The namespace of functions that gpt-oss reads."""
    out = ["## functions\n\nnamespace functions {\n\n"]
    for tool in tools:
        function = tool.get("function", tool)
        out.append(f"// {function.get('description', '')}\ntype {function['name']} = ")
        parameters: Schema = function.get("parameters") or {}
        properties: Schema = parameters.get("properties") or {}
        if not properties:
            out.append("() => any;\n\n")
            continue
        out.append("(_: {\n")
        required = parameters.get("required") or []
        for name, schema in properties.items():
            if schema.get("description"):
                out.append(f"// {schema['description']}\n")
            mark = "" if name in required else "?"
            out.append(f"{name}{mark}: {_harmony_type(schema, required)}{_harmony_default(schema)},\n")
        out.append("}) => any;\n\n")
    return "".join(out) + "} // namespace functions"


def _harmony_default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    if schema.get("enum"):
        return f", // default: {schema['default']}"
    if schema.get("oneOf"):
        return f"// default: {schema['default']}"
    return f", // default: {to_json(schema['default'])}"


def _harmony_type(schema: Schema, required: Sequence[str]) -> str:
    kind = schema.get("type")
    null = " | null" if schema.get("nullable") else ""
    if kind == "array":
        return _harmony_array(schema, required) + null
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if schema.get("oneOf"):
        return _harmony_choice(schema["oneOf"], required)
    if kind == "string":
        if schema.get("enum"):
            return '"' + '" | "'.join(map(str, schema["enum"])) + '"'
        return "string" + null
    if kind in ("number", "integer"):
        return "number"
    if kind == "boolean":
        return "boolean"
    if kind == "object":
        return _harmony_object(schema)
    return "any"


def _harmony_array(schema: Schema, required: Sequence[str]) -> str:
    items = schema.get("items")
    if not items:
        return "any[]"
    simple = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}.get(items.get("type"))
    inner = simple or _harmony_type(items, required)
    return "any[]" if inner == "object | object" or len(inner) > 50 else inner + "[]"


def _harmony_choice(options: Sequence[Schema], required: Sequence[str]) -> str:
    if len(options) > 1 and any(option.get("type") == "object" for option in options):
        return "any"
    out = []
    for option in options:
        text = _harmony_type(option, required)
        if option.get("description"):
            text += f"// {option['description']}"
        if "default" in option:
            text += f"// default: {to_json(option['default'])}"
        out.append(text)
    return " | ".join(out)


def _harmony_object(schema: Schema) -> str:
    properties: Schema = schema.get("properties") or {}
    if not properties:
        return "object"
    required = schema.get("required") or []
    fields = [
        f"{name}{'' if name in required else '?'}: {_harmony_type(field, required)}"
        for name, field in properties.items()
    ]
    return "{\n" + ", ".join(fields) + "}"
