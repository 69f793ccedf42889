"""Checks that an array has the stated dtype and shape, and makes it read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_contracts.errors import InvalidFieldError

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]


def check_array(field: str, array: object, dtype: str, ndim: int, length: int | None = None) -> NDArray[Any]:
    """Return `array` read-only after checking it.

    Args:
        field: name for the error message.
        array: the value to check; must already be a numpy array (nothing is converted silently).
        dtype: numpy dtype name that the contract states.
        ndim: number of dimensions that the contract states.
        length: required size of the first dimension, or None when it is free.

    Raises:
        InvalidFieldError: the value is not an array, or its dtype, rank or length differs.
    """
    if not isinstance(array, np.ndarray):
        raise InvalidFieldError(field, type(array).__name__, f"give a numpy array of dtype {dtype}")
    if array.dtype != np.dtype(dtype):
        raise InvalidFieldError(field, array.dtype.name, f"convert it to {dtype} where it is made")
    if array.ndim != ndim:
        raise InvalidFieldError(field, array.shape, f"give an array of {ndim} dimension(s)")
    if length is not None and array.shape[0] != length:
        raise InvalidFieldError(field, array.shape, f"first dimension must be {length}")
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
