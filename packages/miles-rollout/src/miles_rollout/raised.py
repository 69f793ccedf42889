"""What a user's function raised, with the place in its own code; the first traceback of each place is logged."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from pathlib import Path

from miles_contracts import MilesError

_log = logging.getLogger(__name__)
_PACKAGE = str(Path(__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_SIBLINGS = ("miles_contracts", "miles_loop")
_MAX_PLACES = 32
_logged: set[tuple[str, str]] = set()


def describe_raised(error: Exception, who: str = "a reward function") -> str:
    """`ValueError: boom (/home/me/rewards.py:12)`.

    The place is where the user's code was; of an error that never left this package it is the last one, and none for
    an error of ours, which explains itself.

    Args:
        error: caught, with its traceback.
        who: raised it, for the log.
    """
    text = f"{type(error).__name__}: {error}"
    place = _place(error)
    if place is None:
        return text
    key = (type(error).__name__, place)
    if key not in _logged and len(_logged) < _MAX_PLACES:
        _logged.add(key)
        _log.warning("%s raised at %s (logged once)", who, place, exc_info=error)
    return f"{text} ({place})"


def _place(error: Exception) -> str | None:
    """`file:line` where the foreign function was when it raised: in its own file, not in what it called elsewhere."""
    frames = list(traceback.extract_tb(error.__traceback__))
    foreign = [f for f in frames if not f.filename.startswith(_PACKAGE)]
    if isinstance(error, MilesError):
        # Such errors come through helpers of the standard library; only a caller outside says more than they do.
        frames = foreign = [f for f in foreign if not _is_standard(f.filename) and not _is_ours(f.filename)]
    if not frames:
        return None
    file = foreign[0].filename if foreign else frames[-1].filename
    last = [f for f in frames if f.filename == file][-1]
    return f"{last.filename}:{last.lineno}"


def _is_ours(file: str) -> bool:
    """Whether it is of the packages that stand between a user's function and an engine."""
    return Path(file).parent.name in _SIBLINGS


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and "site-packages" not in file
