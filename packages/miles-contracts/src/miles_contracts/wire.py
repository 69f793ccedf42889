"""One frame format between processes, on disk and in the viewer: msgpack plus aligned raw arrays.

    offset  size  field
    0       4     magic b"MLS1"
    4       2     format version, little-endian (this code reads 1 and 2)
    6       2     reserved, 0
    8       8     body length B
    16      8     array section length A
    24      4     CRC-32 of bytes 32 .. end
    28      4     CRC-32 of bytes 0 .. 27
    32      B     msgpack body; an array is extension type 1: (offset u64, dtype, shape); a routing trace is
                  extension type 2 (version 2): (offset u64, experts u64, rows u64, layers u64, top-k u64)
    ..            zeros up to a multiple of 64
    ..      A     arrays, little-endian, C order, each starting at a multiple of 64

Arrays are decoded without a copy: they are read-only views into the frame. The ids of a routing trace lie in the
array section at ceil(log2(experts)) bits each (`RoutingTrace.pack`); version 1 held them as a plain array, which is
still read. A frame says the lowest version that can read it: 2 when it holds a trace, else 1. Rule for growth: a
field that this code does not know is ignored, a missing field takes its default, and a higher format version is
refused.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts.alignment import ALIGNMENT, aligned
from miles_contracts.bitpack import packed_words
from miles_contracts.errors import WireError
from miles_contracts.routing import RoutingTrace, id_bits, narrowest_dtype

MAGIC = b"MLS1"
FORMAT_VERSION = 2
CONTENT_TYPE = "application/vnd.miles.frame"
"""Of a frame in an HTTP body."""
_HEADER = struct.Struct("<4sHHQQI")
HEADER_BYTES = 32
"""Length of the header that every frame begins with; `frame_length` needs so much of it."""
_ARRAY_EXT = 1
_TRACE_EXT = 2
_TRACE = struct.Struct("<5Q")
_DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)
_DTYPE_CODE = {np.dtype(name): code for code, name in enumerate(_DTYPES)}
_LITTLE = [np.dtype(name).newbyteorder("<") for name in _DTYPES]

T = TypeVar("T")


def _padding(n: int) -> int:
    return -n % ALIGNMENT


class _Collector:
    """Gathers arrays while the body is encoded and hands out their offsets."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.size = 0
        self.version = 1

    def __call__(self, obj: Any) -> Any:
        if isinstance(obj, np.generic):
            return obj.item()
        if isinstance(obj, RoutingTrace):
            self.version = 2
            offset, _ = self._add(obj.pack())
            return msgspec.msgpack.Ext(_TRACE_EXT, _TRACE.pack(offset, obj.num_experts, *obj.expert_ids.shape))
        if not isinstance(obj, np.ndarray):
            raise WireError(f"cannot encode a value of type {type(obj).__name__}; use plain values and arrays")
        offset, code = self._add(obj)
        return msgspec.msgpack.Ext(_ARRAY_EXT, struct.pack(f"<QBB{obj.ndim}Q", offset, code, obj.ndim, *obj.shape))

    def _add(self, array: NDArray[Any]) -> tuple[int, int]:
        """Append an array to the section; its offset and dtype code."""
        code = _DTYPE_CODE.get(array.dtype.newbyteorder("="))
        if code is None:
            raise WireError(f"cannot encode an array of dtype {array.dtype}; use one of {', '.join(_DTYPES)}")
        data = np.ascontiguousarray(array, dtype=_LITTLE[code])
        offset = self.size
        pad = _padding(data.nbytes)
        self.parts.append(data.reshape(-1).view(np.uint8).data if data.nbytes else b"")
        if pad:
            self.parts.append(bytes(pad))
        self.size += data.nbytes + pad
        return offset, code


def encode_parts(obj: Any) -> list[Any]:
    """The frame of `obj` as a list of buffers to be written one after the other; arrays are not copied.

    Raises:
        WireError: a value or dtype that the format does not know.
    """
    collector = _Collector()
    try:
        body = msgspec.msgpack.Encoder(enc_hook=collector).encode(obj)
    except TypeError as error:
        raise WireError(f"cannot encode: {error}") from error
    body_pad = bytes(_padding(HEADER_BYTES + len(body)))
    tail: list[Any] = [body, body_pad, *collector.parts]
    crc = 0
    for part in tail:
        crc = zlib.crc32(part, crc)
    head = _HEADER.pack(MAGIC, collector.version, 0, len(body), collector.size, crc)
    return [head + struct.pack("<I", zlib.crc32(head)), *tail]


def encode(obj: Any) -> bytes:
    """The frame of `obj` as bytes."""
    return b"".join(encode_parts(obj))


def frame_length(header: bytes | memoryview) -> int:
    """Total bytes of the frame whose first 32 bytes are given, so that a stream reader knows how much to wait for.

    Raises:
        WireError: not a header of this format, or of a newer one.
    """
    body, arrays, _ = _parse_header(memoryview(header))
    return aligned(HEADER_BYTES + body) + arrays


def _parse_header(view: memoryview) -> tuple[int, int, int]:
    if len(view) < HEADER_BYTES:
        raise WireError(f"truncated header: {len(view)} of {HEADER_BYTES} bytes")
    head = view[: _HEADER.size]
    magic, version, _, body, arrays, crc = _HEADER.unpack(head)
    if magic != MAGIC:
        raise WireError(f"not a Miles frame: it starts with {bytes(magic)!r}, expected {MAGIC!r}")
    (head_crc,) = struct.unpack("<I", view[_HEADER.size : HEADER_BYTES])
    if zlib.crc32(head) != head_crc:
        raise WireError("corrupted header: its checksum does not match")
    if version > FORMAT_VERSION:
        raise WireError(f"frame has format version {version}, this code reads up to {FORMAT_VERSION}; upgrade Miles")
    return body, arrays, crc


def decode(data: bytes | bytearray | memoryview, type: type[T]) -> T:
    """Decode one frame into `type`; arrays are read-only views into `data`.

    Raises:
        WireError: truncated, corrupted, foreign or newer data, or a value that breaks a contract.
    """
    view = memoryview(data).cast("B").toreadonly()
    body_length, array_length, crc = _parse_header(view)
    body_end = HEADER_BYTES + body_length
    start = aligned(body_end)
    total = start + array_length
    if len(view) != total:
        raise WireError(f"frame is {len(view)} bytes long, its header says {total}")
    if zlib.crc32(view[HEADER_BYTES:]) != crc:
        raise WireError("corrupted frame: its checksum does not match")
    section = view[start:]

    def array(code: int, payload: memoryview) -> Any:
        if code == _ARRAY_EXT:
            return _read_array(payload, section)
        if code == _TRACE_EXT:
            return _read_trace(payload, section)
        raise WireError(f"unknown extension type {code}")

    try:
        # An array arrives through ext_hook already; dec_hook only tells msgspec that it is what was asked for.
        decoder = msgspec.msgpack.Decoder(type, ext_hook=array, dec_hook=_expect_array)
        return decoder.decode(view[HEADER_BYTES:body_end])
    except (msgspec.MsgspecError, struct.error, ValueError) as error:
        raise WireError(f"frame does not hold a valid {getattr(type, '__name__', type)}: {error}") from error


def _expect_array(expected: Any, value: Any) -> Any:
    if expected is RoutingTrace:
        if isinstance(value, dict) and "expert_ids" in value:  # format version 1
            return RoutingTrace(expert_ids=value["expert_ids"], num_experts=value["num_experts"])
        if not isinstance(value, RoutingTrace):
            raise TypeError(f"expected a routing trace, got {value.__class__.__name__}")
    elif not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array, got {value.__class__.__name__}")
    return value


def _read_array(payload: memoryview, section: memoryview) -> NDArray[Any]:
    offset, code, ndim = struct.unpack_from("<QBB", payload)
    shape = struct.unpack_from(f"<{ndim}Q", payload, 10)
    if code >= len(_DTYPES):
        raise WireError(f"unknown array dtype code {code}")
    return _view(section, offset, _LITTLE[code], shape)


def _read_trace(payload: memoryview, section: memoryview) -> RoutingTrace:
    if len(payload) != _TRACE.size:
        raise WireError(f"a routing trace's entry has {len(payload)} of {_TRACE.size} bytes")
    offset, experts, rows, layers, top_k = _TRACE.unpack(payload)
    dtype = narrowest_dtype(experts)
    words = packed_words(rows * layers * top_k, id_bits(experts), dtype)
    packed = _view(section, offset, dtype.newbyteorder("<"), (words,))
    return RoutingTrace.unpack(packed, (rows, layers, top_k), experts)


def _view(section: memoryview, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A read-only view into the array section."""
    count = math.prod(shape)
    if offset % ALIGNMENT or offset + count * dtype.itemsize > len(section):
        raise WireError(f"array of shape {shape} at {offset} lies outside the frame")
    flat = np.frombuffer(section, dtype=dtype, count=count, offset=offset) if count else np.empty(0, dtype)
    flat = flat.reshape(shape)
    flat.flags.writeable = False
    return flat
