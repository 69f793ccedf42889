"""JSON text as chat templates print it, which is what models were trained to read."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """JSON text in insertion order, non-ASCII characters as they are (Hugging Face's `tojson`)."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


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
