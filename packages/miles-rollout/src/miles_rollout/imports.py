"""Objects that a user names by import path."""

from __future__ import annotations

import importlib
from typing import Any

from miles_contracts import InvalidFieldError


def load_object(path: str, *, field: str) -> Any:
    """The callable named `package.module:name`.

    Args:
        path: where it is; the module must be importable from the current environment.
        field: what it is for, for error messages.

    Raises:
        InvalidFieldError: bad form, module or attribute missing, or not callable. An error that the module
            itself raises while it is imported is passed on.
    """
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise InvalidFieldError(field, path, "write it as package.module:name")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise InvalidFieldError(field, path, f"there is no module {error.name}; is it on PYTHONPATH?") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise InvalidFieldError(field, path, f"module {module_name} has no {attribute}") from error
    if not callable(found):
        raise InvalidFieldError(field, path, f"it is a {type(found).__name__}, not a function")
    return found
