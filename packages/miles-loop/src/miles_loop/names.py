"""Suggests the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`did you mean 'x'? ` when some known name is close to `name`, else an empty string.

    Args:
        name: what was said.
        known: what could have been said.
        cutoff: likeness in [0, 1] from which on a name is close.
    """
    found = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {found[0]!r}? " if found else ""
