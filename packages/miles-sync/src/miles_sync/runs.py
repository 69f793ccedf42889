"""Strided copies between bytes: many runs of one length, packed behind each other or spread out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]

_FEW = 64
"""Below this many runs a copy per run is cheaper than an index over them."""


def take_runs(data: Bytes, offsets: Offsets, length: int) -> Bytes:
    """The runs of `data` behind each other: uint8 [len(offsets) * length]; a view when they are contiguous."""
    if _contiguous(offsets, length):
        return data[int(offsets[0]) : int(offsets[0]) + len(offsets) * length]
    if len(offsets) <= _FEW:
        return np.concatenate([data[o : o + length] for o in offsets.tolist()])
    return _windows(data, length)[offsets].reshape(-1)


def put_runs(data: Bytes, offsets: Offsets, length: int, packed: Bytes) -> None:
    """Spread `packed` over the runs of `data`."""
    if _contiguous(offsets, length):
        data[int(offsets[0]) : int(offsets[0]) + len(packed)] = packed
    elif len(offsets) <= _FEW:
        for number, offset in enumerate(offsets.tolist()):
            data[offset : offset + length] = packed[number * length : (number + 1) * length]
    else:
        _windows(data, length)[offsets] = packed.reshape(-1, length)


def _contiguous(offsets: Offsets, length: int) -> bool:
    return len(offsets) == 1 or bool((np.diff(offsets) == length).all())


def _windows(data: Bytes, length: int) -> Bytes:
    """[len(data) - length + 1, length] view: row i is the run that begins at byte i."""
    view: Bytes = np.lib.stride_tricks.as_strided(data, (len(data) - length + 1, length), (1, 1))
    return view
