"""The difference of two byte strings, compressed: what an optimiser step leaves of a chunk of weights.

Three encodings, the smallest is taken:

    xor        new XOR old, byte planes apart (all first bytes, then all second ones ...): most planes are zeros
    sparse     count u32 | gaps between changed elements u32[count] | XOR of those elements; planes apart as well
    overwrite  the new bytes, planes apart

All end in one zstd frame. Chunks are far below 4 GiB, so a 32-bit gap cannot wrap.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError

Bytes = NDArray[np.uint8]

MAX_CHUNK_BYTES = 1 << 30
_SPARSE_BELOW = 0.25
"""Share of changed elements above which positions cannot be cheaper than zeros between them."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Encoding(StrEnum):
    """How a chunk's payload is to be read."""

    XOR = "xor"
    SPARSE = "sparse"
    OVERWRITE = "overwrite"


class DeltaDecodeError(ValueError):
    """A payload is not what its index says."""


def encode(old: Bytes | None, new: Bytes, item_bytes: int, level: int = 1) -> tuple[Encoding, bytes] | None:
    """Payload that turns `old` into `new`; None when they are equal.

    Args:
        old: uint8 [n], or None when there is nothing to build on.
        new: uint8 [n].
        item_bytes: 1, 2, 4 or 8, a divisor of n: the size of an element.
        level: zstd's.
    """
    _check(new, item_bytes)
    packer = zstandard.ZstdCompressor(level=level)
    if old is None:
        return Encoding.OVERWRITE, packer.compress(_planes(new, item_bytes))
    change = np.bitwise_xor(_items(old, item_bytes), _items(new, item_bytes))
    places = np.flatnonzero(change)
    if not len(places):
        return None
    density = len(places) / len(change)
    if density < _SPARSE_BELOW:
        best = (Encoding.SPARSE, packer.compress(_sparse(change, places, item_bytes)))
        # Where nearly nothing has changed zstd turns the zeros of a dense difference into almost nothing as well.
        if density < 0.01:
            return best
    dense = (Encoding.XOR, packer.compress(_planes(change.view(np.uint8), item_bytes)))
    if density >= _SPARSE_BELOW or len(dense[1]) < len(best[1]):
        best = dense
    if len(best[1]) > 0.6 * len(new):
        whole = (Encoding.OVERWRITE, packer.compress(_planes(new, item_bytes)))
        if len(whole[1]) < len(best[1]):
            return whole
    return best


def decode(encoding: Encoding, payload: bytes, target: Bytes, item_bytes: int) -> None:
    """Turn the old bytes in `target` into the new ones, in place.

    Raises:
        DeltaDecodeError: the payload is torn, damaged or of another chunk. `target` is then undefined.
    """
    _check(target, item_bytes)
    size = len(target)
    limit = size if encoding is not Encoding.SPARSE else 4 + size // item_bytes * (4 + item_bytes)
    raw = _decompress(payload, limit)
    if encoding is Encoding.SPARSE:
        _apply_sparse(raw, target, item_bytes)
        return
    if len(raw) != size:
        raise DeltaDecodeError(f"holds {len(raw)} bytes, {size} expected")
    plain = _join_planes(raw, item_bytes)
    if encoding is Encoding.XOR:
        np.bitwise_xor(target, plain, out=target)
    else:
        target[:] = plain


def _check(data: Bytes, item_bytes: int) -> None:
    if item_bytes not in _UNSIGNED:
        raise InvalidFieldError("item_bytes", item_bytes, "use 1, 2, 4 or 8")
    if len(data) % item_bytes or len(data) > MAX_CHUNK_BYTES:
        remedy = f"give a multiple of item_bytes, at most {MAX_CHUNK_BYTES} bytes"
        raise InvalidFieldError("chunk", len(data), remedy)


def _items(data: Bytes, item_bytes: int) -> NDArray[Any]:
    return data.view(_UNSIGNED[item_bytes])


def _planes(data: Bytes, item_bytes: int) -> bytes:
    if item_bytes == 1:
        return data.tobytes()
    return data.reshape(-1, item_bytes).T.tobytes()


def _join_planes(raw: Bytes, item_bytes: int) -> Bytes:
    if item_bytes == 1:
        return raw
    out: Bytes = np.ascontiguousarray(raw.reshape(item_bytes, -1).T).reshape(-1)
    return out


def _sparse(change: NDArray[Any], places: NDArray[np.intp], item_bytes: int) -> bytes:
    gaps = np.diff(places, prepend=0).astype(np.uint32)
    values = np.ascontiguousarray(change[places]).view(np.uint8)
    return struct.pack("<I", len(places)) + _planes(gaps.view(np.uint8), 4) + _planes(values, item_bytes)


def _apply_sparse(raw: Bytes, target: Bytes, item_bytes: int) -> None:
    if len(raw) < 4:
        raise DeltaDecodeError("holds no count")
    (count,) = struct.unpack("<I", raw[:4].tobytes())
    if len(raw) != 4 + count * (4 + item_bytes):
        raise DeltaDecodeError(f"holds {len(raw)} bytes for {count} changes")
    gaps = _join_planes(raw[4 : 4 + 4 * count], 4).view(np.uint32)
    values = np.ascontiguousarray(_join_planes(raw[4 + 4 * count :], item_bytes)).view(_UNSIGNED[item_bytes])
    places = np.cumsum(gaps, dtype=np.int64)
    items = _items(target, item_bytes)
    if count and (places[-1] >= len(items) or (count > 1 and not gaps[1:].all())):
        raise DeltaDecodeError("names elements that the chunk does not have")
    items[places] ^= values


def _decompress(payload: bytes, limit: int) -> Bytes:
    try:
        stated = zstandard.frame_content_size(payload)
        if stated < 0 or stated > limit:
            raise DeltaDecodeError(f"says it unpacks to {stated} bytes, at most {limit} are possible")
        raw = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise DeltaDecodeError(f"is not a zstd frame: {error}") from error
    return np.frombuffer(raw, dtype=np.uint8)
