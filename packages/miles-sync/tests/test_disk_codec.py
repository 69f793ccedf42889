from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_sync.disk.codec import Bytes, DeltaDecodeError, Encoding, decode, encode


@st.composite
def changes(draw: st.DrawFn) -> tuple[Bytes, Bytes, int]:
    """Old bytes, new bytes of the same length, element size; from untouched to completely different."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.integers(0, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 256, count * item, dtype=np.uint8)
    new = old.copy()
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    mask = rng.random(len(new)) < share
    new[mask] = rng.integers(0, 256, int(mask.sum()), dtype=np.uint8)
    return old, new, item


@settings(max_examples=300, deadline=None)
@given(change=changes())
def test_decoding_gives_back_every_bit(change: tuple[Bytes, Bytes, int]) -> None:
    old, new, item = change
    encoded = encode(old, new, item)
    if encoded is None:
        assert np.array_equal(old, new)
        return
    target = old.copy()
    decode(*encoded, target, item)
    assert np.array_equal(target, new)


@given(change=changes())
def test_without_a_base_the_bytes_themselves_travel(change: tuple[Bytes, Bytes, int]) -> None:
    old, new, item = change
    encoded = encode(None, new, item)
    assert encoded is not None
    decode(*encoded, old, item)
    assert np.array_equal(old, new)


def weights(count: int, seed: int) -> Bytes:
    """bfloat16 bytes of normal weights: the upper half of float32."""
    values = np.random.default_rng(seed).normal(size=count).astype("<f4")
    return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.001, Encoding.SPARSE), (0.01, Encoding.SPARSE), (0.6, Encoding.XOR)]
)
def test_the_smallest_encoding_is_taken_for_a_step_of_the_last_bit(share: float, expected: Encoding) -> None:
    old = weights(100_000, 0)
    new = old.copy()
    new[::2][np.random.default_rng(1).random(100_000) < share] ^= 1
    encoded = encode(old, new, 2)
    assert encoded is not None
    assert encoded[0] is expected
    assert len(encoded[1]) < 4 * share * 100_000


def test_bytes_that_have_nothing_in_common_travel_as_they_are() -> None:
    old = np.random.default_rng(0).integers(0, 256, 80_000, dtype=np.uint8)
    encoded = encode(old, weights(40_000, 1), 2)
    assert encoded is not None
    assert encoded[0] is Encoding.OVERWRITE


def sparse(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


@pytest.mark.parametrize(
    ("encoding", "payload", "message"),
    [
        (Encoding.XOR, b"not zstd", "is not a zstd frame"),
        (Encoding.XOR, sparse(bytes(15)), "holds 15 bytes, 16 expected"),
        (Encoding.XOR, sparse(bytes(17)), "says it unpacks to 17 bytes, at most 16"),
        (Encoding.OVERWRITE, sparse(bytes(16))[:-3], "is not a zstd frame"),
        (Encoding.SPARSE, sparse(b"\0\0"), "holds no count"),
        (Encoding.SPARSE, sparse(struct.pack("<I", 2) + bytes(6)), "holds 10 bytes for 2 changes"),
        (Encoding.SPARSE, sparse(struct.pack("<IB3x", 1, 9) + bytes(2)), "names elements that the chunk does not have"),
        (Encoding.SPARSE, sparse(struct.pack("<I", 2) + bytes(12)), "names elements"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(encoding: Encoding, payload: bytes, message: str) -> None:
    with pytest.raises(DeltaDecodeError, match=message):
        decode(encoding, payload, np.zeros(16, np.uint8), 2)


def test_refuses_sizes_that_are_not_elements() -> None:
    with pytest.raises(InvalidFieldError, match="item_bytes: got 3"):
        encode(None, np.zeros(6, np.uint8), 3)
    with pytest.raises(InvalidFieldError, match="multiple of item_bytes"):
        encode(None, np.zeros(7, np.uint8), 2)
