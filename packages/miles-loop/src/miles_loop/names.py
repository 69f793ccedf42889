"""Suggests the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` when some known name is close to `name`, else an empty string."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {found[0]!r}? " if found else ""
