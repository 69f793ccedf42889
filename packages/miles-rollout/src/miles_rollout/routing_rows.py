"""Expert choices as an engine sends them, decoded only where somebody looks.

An engine returns the rows of the whole sequence after every turn. A session needs only those of the tokens that
were fed for the first time, so that decoding everything would cost time and memory in the square of its length.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from miles_contracts import InvalidFieldError


class RoutingRows:
    """An array [rows, layers, top_k] in base64. Slices of rows, and `np.asarray`, are read-only numpy arrays.

    Args:
        text: base64 of the array in C order.
        shape: (rows, layers, top_k).
        dtype: of the elements.

    Raises:
        InvalidFieldError: the text is not as long as shape and dtype say.
    """

    ndim = 3

    def __init__(self, text: str, shape: tuple[int, int, int], dtype: DTypeLike) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._text = text
        self._row_bytes = shape[1] * shape[2] * self.dtype.itemsize
        size = encoded_bytes(text)
        if size != shape[0] * self._row_bytes:
            raise InvalidFieldError(
                "routing",
                f"{size} bytes",
                f"{math.prod(shape)} ids of {self.dtype.name} (shape {shape}) were announced",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded array."""
        return self.shape[0] * self._row_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise InvalidFieldError("rows", rows, "take rows one after the other")
        stop = max(start, stop)
        first, last = start * self._row_bytes, stop * self._row_bytes
        skipped = first // 3  # three bytes are four characters
        try:
            data = base64.b64decode(self._text[4 * skipped : 4 * -(-last // 3)], validate=True)
        except binascii.Error as error:
            raise InvalidFieldError("routing", self._text[:20], f"not base64: {error}") from error
        count = (stop - start) * self.shape[1] * self.shape[2]
        flat = np.frombuffer(data, dtype=self.dtype, count=count, offset=first - 3 * skipped)
        return flat.reshape(stop - start, *self.shape[1:])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self[:], dtype=dtype, copy=copy)


def encoded_bytes(text: str) -> int:
    """Bytes that a base64 text stands for."""
    padding = len(text) - len(text.rstrip("=")) if text.endswith("=") else 0
    return len(text) // 4 * 3 - padding
