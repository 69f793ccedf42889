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

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from miles_contracts.errors import InvalidFieldError

_BLOCK = 1 << 17
"""Words of a lane that are worked on at a time, so that they stay in the processor's cache."""


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
    flat = values.reshape(-1)
    if flat[count:].any():
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
