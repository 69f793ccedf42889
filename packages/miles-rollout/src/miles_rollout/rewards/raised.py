"""What a reward function raised, with the place in its own code; the first traceback of each place is logged."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

_log = logging.getLogger(__name__)
_PACKAGE = str(Path(__file__).parents[1])
_MAX_PLACES = 32
_logged: set[tuple[str, str]] = set()


def describe_raised(error: Exception) -> str:
    """`ValueError: boom (/home/me/rewards.py:12)`; without a place when only this package's code was involved.

    Args:
        error: caught, with its traceback.
    """
    text = f"{type(error).__name__}: {error}"
    place = _place(error)
    if place is None:
        return text
    key = (type(error).__name__, place)
    if key not in _logged and len(_logged) < _MAX_PLACES:
        _logged.add(key)
        _log.warning("a reward function raised at %s (logged once)", place, exc_info=error)
    return f"{text} ({place})"


def _place(error: Exception) -> str | None:
    """`file:line` where the foreign function was when it raised: in its own file, not in what it called elsewhere."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
    if not frames:
        return None
    last = [f for f in frames if f.filename == frames[0].filename][-1]
    return f"{last.filename}:{last.lineno}"
