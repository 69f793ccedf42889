"""JSON text as chat templates print it, which is what models were trained to read."""

from __future__ import annotations

import json
from typing import Any

from miles_contracts import ToolCall
from miles_rollout.renderers.errors import RenderError


def to_json(value: Any, *, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON text, in insertion order unless `sort_keys`, non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=sort_keys)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object in a call's argument text, or None when the text is something else."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def normalised_arguments(text: str) -> str:
    """Argument text spelled as templates spell it; text that is not an object stays as it is."""
    value = parse_arguments(text)
    return text if value is None else to_json(value)


def call_arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call whose form must be an object.

    Raises:
        RenderError: the arguments are not a JSON object.
    """
    value = parse_arguments(call.function.arguments)
    if value is None:
        raise RenderError(
            f"tool_calls[].function.arguments: {call.function.arguments[:80]!r} of {call.function.name!r} is not an "
            "object; this family writes arguments one by one"
        )
    return value
