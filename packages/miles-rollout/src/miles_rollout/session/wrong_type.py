"""From what a decoder refuses to an error of the API that names the field, as OpenAI's do."""

from __future__ import annotations

import re

import msgspec

from miles_contracts import InvalidFieldError
from miles_rollout.session.errors import BadRequestError

_PLACE = re.compile(r" - at `(?:key` in `)?\$(?P<path>[^`]*)`$")
_NAMED = re.compile(r"(?:missing required|contains unknown) field `(?P<name>[^`]+)`")
_INDEX = re.compile(r"^\[(\d+)\]")


def refused(error: Exception, *, root: str = "", first_index: int = 0) -> BadRequestError:
    """The error for a client whose request, or the part `root` of it, could not be decoded.

    Args:
        error: what the decoder raised.
        root: name of the field that was decoded; "" for the whole body.
        first_index: position, in the field, of the first item of the array that was decoded.

    Text that is not JSON, and a body that is no object, have no field to name.
    """
    if isinstance(error, InvalidFieldError):
        return BadRequestError(str(error), param=error.field)
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return BadRequestError(f"{root or 'request body'}: {text}", param=root or None)
    place = _PLACE.search(text)
    path = place["path"] if place else ""
    index = _INDEX.match(path)
    if index is not None:
        path = f"[{int(index[1]) + first_index}]{path[index.end() :]}"
    named = _NAMED.search(text)
    if named is not None:
        path += f".{named['name']}"
    field = f"{root}{path}".lstrip(".")
    what = text[: place.start()] if place else text
    return BadRequestError(f"{field or 'request body'}: {what[:1].lower()}{what[1:]}", param=field or None)
