"""Small integers in as few bits as they need, exactly, at the order of memory bandwidth.

Values of `width` bits are packed into words of their own dtype (W = 8, 16, 32 or 64 bits). P = W / gcd(width, W)
values fill Q = width / gcd(width, W) words. To need no loop over values, the values are cut into P runs ("lanes")
of m = ceil(count / P), the last filled up with zeros, and word j of each of Q word runs takes the j-th value of
every lane:

    lane p        bits p * width .. of the P values   ->  word run (p * width) // W, shift (p * width) % W
    value p*m + j                                     ->  word j of that run; what does not fit goes to the next run

    width 7, W 8: eight lanes, seven word runs        width 4, W 8: two lanes, one word run, low and high halves

So every step is one shift, mask or union of whole arrays. A width that equals W is the array itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from miles_contracts.errors import InvalidFieldError

_BLOCK = 1 << 17
"""Words of a lane that are worked on at a time, so that they stay in the processor's cache."""
_FEW = 1 << 11
"""Up to so many bytes a lane it takes less time to put all lanes into one 64-bit number in a few calls."""


def packed_words(count: int, width: int, dtype: DTypeLike) -> int:
    """Words that `count` values of `width` bits take.

    Raises:
        InvalidFieldError: a width outside 1 .. bits of the dtype.
    """
    lanes, runs = _layout(width, np.dtype(dtype))
    return -(-count // lanes) * runs


def pack_bits(values: NDArray[Any], width: int) -> NDArray[Any]:
    """Pack unsigned values < 2**width (not checked here), flat in C order.

    Args:
        values: any shape, an unsigned dtype of W bits.
        width: bits of each, 1 .. W.

    Returns:
        The words, [packed_words], in the dtype of `values`; a view of them when width is W.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    dtype = flat.dtype
    lanes, runs = _layout(width, dtype)
    if lanes == runs:
        return flat
    size, bits = -(-len(flat) // lanes), 8 * dtype.itemsize
    if len(flat) != lanes * size:
        flat = np.concatenate([flat, np.zeros(lanes * size - len(flat), dtype)])
    if bits == 8 and size <= _FEW:
        return _pack_few(flat.reshape(lanes, size), width, runs)
    source, words = flat.reshape(lanes, size), np.empty((runs, size), dtype)
    scratch = np.empty(min(size, _BLOCK), dtype)
    for start in range(0, size, _BLOCK):
        block = slice(start, min(start + _BLOCK, size))
        shifted = scratch[: block.stop - start]
        for lane in range(lanes):
            run, shift = divmod(lane * width, bits)
            if shift == 0:
                words[run, block] = source[lane, block]
                continue
            # numpy multiplies bytes far faster than it shifts them to the left
            np.multiply(source[lane, block], dtype.type(1 << shift), out=shifted)
            np.bitwise_or(words[run, block], shifted, out=words[run, block])
            if shift + width > bits:
                np.right_shift(source[lane, block], dtype.type(bits - shift), out=words[run + 1, block])
    return words.reshape(-1)


def unpack_bits(words: NDArray[Any], width: int, count: int) -> NDArray[Any]:
    """The `count` values that `pack_bits` packed, flat; a view of the words when width is W.

    Raises:
        InvalidFieldError: another number of words than `count` values take (truncated or overlong), or a filling
            that is not zero.
    """
    dtype = words.dtype
    lanes, runs = _layout(width, dtype)
    want = packed_words(count, width, dtype)
    if words.ndim != 1 or len(words) != want:
        raise InvalidFieldError("packed words", words.shape, f"{count} values of {width} bits take {want} words")
    if lanes == runs:
        return words
    size, bits = want // runs, 8 * dtype.itemsize
    if bits == 8 and size <= _FEW:
        values = _unpack_few(words.reshape(runs, size), width, lanes)
        return _without_filling(values, count)
    source, values = words.reshape(runs, size), np.empty((lanes, size), dtype)
    mask = dtype.type((1 << width) - 1)
    scratch = np.empty(min(size, _BLOCK), dtype)
    for start in range(0, size, _BLOCK):
        block = slice(start, min(start + _BLOCK, size))
        shifted = scratch[: block.stop - start]
        for lane in range(lanes):
            run, shift = divmod(lane * width, bits)
            out = values[lane, block]
            np.right_shift(source[run, block], dtype.type(shift), out=out)
            if shift + width > bits:
                np.multiply(source[run + 1, block], dtype.type(1 << (bits - shift)), out=shifted)
                np.bitwise_or(out, shifted, out=out)
            if shift + width != bits:
                np.bitwise_and(out, mask, out=out)
    return _without_filling(values, count)


def _pack_few(source: NDArray[np.uint8], width: int, runs: int) -> NDArray[np.uint8]:
    """As `pack_bits`: the at most 56 bits of a word in every run are one number."""
    numbers = np.bitwise_or.reduce(source.astype("<u8") << _shifts(width, len(source)), axis=0)
    octets = numbers.view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(octets[:, :runs].T).reshape(-1)


def _unpack_few(source: NDArray[np.uint8], width: int, lanes: int) -> NDArray[np.uint8]:
    octets = np.zeros((source.shape[1], 8), np.uint8)
    octets[:, : len(source)] = source.T
    numbers = octets.view("<u8").reshape(-1) >> _shifts(width, lanes)
    return (numbers & np.uint64((1 << width) - 1)).astype(np.uint8)


@functools.cache
def _shifts(width: int, lanes: int) -> NDArray[np.uint64]:
    """Place of each lane's bits in the number, [lanes, 1]."""
    return np.arange(0, width * lanes, width, dtype=np.uint64)[:, None]


def _without_filling(values: NDArray[Any], count: int) -> NDArray[Any]:
    flat = values.reshape(-1)
    if count < len(flat) and flat[count:].any():
        raise InvalidFieldError("packed words", "a filling that is not zero", "the words are damaged; send them again")
    return flat[:count]


def _layout(width: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Lanes P and word runs Q."""
    bits = 8 * dtype.itemsize
    if dtype.kind != "u":
        raise InvalidFieldError("dtype", dtype.name, "pack unsigned integers")
    if not 1 <= width <= bits:
        raise InvalidFieldError("width", width, f"a {dtype.name} has 1 .. {bits} bits")
    common = math.gcd(width, bits)
    return bits // common, width // common
