from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import groups

from miles_contracts import (
    Group,
    RoutingTrace,
    Status,
    Trajectory,
    TrajectoryIdentity,
    Turn,
    VersionSpan,
    WireError,
    wire,
)

GOLDEN = Path(__file__).parent / "golden" / "group_v2.bin"
GOLDEN_V1 = Path(__file__).parent / "golden" / "group_v1.bin"


def golden_group() -> Group:
    nan = float("nan")
    t = Trajectory(
        identity=TrajectoryIdentity(prompt_index=12, member=1, attempt=2, session_id="abc"),
        token_ids=np.array([101, 102, 7, 8, 9], dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], dtype=np.bool_),
        logprobs=np.array([nan, nan, -0.25, -1.5, -3.0], dtype=np.float32),
        version_spans=(VersionSpan(start=2, end=4, version=6), VersionSpan(start=4, end=5, version=None)),
        status=Status.TRUNCATED,
        turns=(Turn(start=2, end=5, finish_reason="length", cached_tokens=1),),
        reward=0.5,
        routing=RoutingTrace.of(np.arange(8).reshape(4, 1, 2), 300),
        metrics={"accuracy": 1.0},
        metadata={"task": "é", "n": [1, None, True]},
    )
    return Group(prompt_index=12, size=2, trajectories=(t,), attempt=2, metadata={"label": "9"})


def same(a: Any, b: Any) -> bool:
    """Equality that looks into arrays (bitwise, so NaN equals NaN) and structures."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, RoutingTrace):
        return isinstance(b, RoutingTrace) and a.num_experts == b.num_experts and same(a.expert_ids, b.expert_ids)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_golden_bytes_have_not_changed() -> None:
    assert wire.encode(golden_group()) == GOLDEN.read_bytes()
    assert same(wire.decode(GOLDEN.read_bytes(), Group), golden_group())


def test_frames_of_version_1_are_read() -> None:
    """Traces were plain arrays; a frame without a trace is still written as version 1."""
    assert same(wire.decode(GOLDEN_V1.read_bytes(), Group), golden_group())
    assert struct.unpack_from("<H", wire.encode({"a": np.arange(3)}), 4) == (1,)


def test_golden_file_reads_with_an_independent_msgpack() -> None:
    """The layout of the module's docstring, followed with struct and another msgpack library only."""
    data = GOLDEN.read_bytes()
    magic, version, _, body_len, array_len, crc = struct.unpack_from("<4sHHQQI", data)
    assert (magic, version) == (b"MLS1", 2)
    assert zlib.crc32(data[32:]) == crc
    start = len(data) - array_len
    assert start % 64 == 0
    found: list[tuple[int, ...]] = []

    def ext(code: int, payload: bytes) -> str:
        if code == 2:
            found.append(struct.unpack("<5Q", payload))
        else:
            offset, dtype, ndim = struct.unpack_from("<QBB", payload)
            found.append((offset, dtype, *struct.unpack_from(f"<{ndim}Q", payload, 10)))
        return f"array{len(found) - 1}"

    body = msgpack.unpackb(data[32 : 32 + body_len], ext_hook=ext)
    assert body["type"] == "group"
    (t,) = body["trajectories"]
    assert (t["status"], t["reward"], t["metadata"]["task"]) == ("truncated", 0.5, "é")
    offset, *rest = found[int(t["token_ids"].removeprefix("array"))]
    assert rest == [6, 5]
    assert struct.unpack_from("<5i", data, start + offset) == (101, 102, 7, 8, 9)
    # ids 0 .. 7 of 300 experts: 9 bits each, one id a lane of 16, nine words of 16 bits
    offset, *rest = found[int(t["routing"].removeprefix("array"))]
    assert rest == [300, 4, 1, 2]
    number = sum(value << (9 * lane) for lane, value in enumerate(range(8)))
    assert data[start + offset : start + offset + 18] == number.to_bytes(18, "little")


@given(groups())
def test_round_trip(group: Group) -> None:
    data = wire.encode(group)
    assert wire.frame_length(data[:32]) == len(data)
    assert same(wire.decode(data, Group), group)
    assert b"".join(wire.encode_parts(group)) == data


def test_decode_is_zero_copy_aligned_and_read_only() -> None:
    data = bytearray(wire.encode(golden_group()))
    ids = wire.decode(data, Group).trajectories[0].token_ids
    assert np.shares_memory(ids, np.frombuffer(data, np.uint8))
    assert (ids.ctypes.data - np.frombuffer(data, np.uint8).ctypes.data) % 64 == 0
    assert not ids.flags.writeable


def test_encode_parts_does_not_copy_arrays() -> None:
    big = np.arange(1024, dtype=np.int32)
    parts = wire.encode_parts([big])
    assert any(isinstance(p, memoryview) and np.shares_memory(np.frombuffer(p, np.uint8), big) for p in parts)


@given(groups(), st.data())
def test_truncation_is_always_noticed(group: Group, data: st.DataObject) -> None:
    frame = wire.encode(group)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(WireError, match="truncated|frame is"):
        wire.decode(frame[:cut], Group)


@given(groups(), st.data())
def test_any_flipped_bit_is_noticed(group: Group, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(group))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        wire.decode(frame, Group)


@given(st.binary(max_size=200))
def test_foreign_bytes_give_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data, Group)


def test_newer_format_version_is_refused() -> None:
    head = struct.pack("<4sHHQQI", b"MLS1", 3, 0, 0, 0, 0)
    with pytest.raises(WireError, match="version 3.*upgrade"):
        wire.decode(head + struct.pack("<I", zlib.crc32(head)), Group)


class Old(msgspec.Struct, frozen=True, kw_only=True, tag="thing"):
    a: int


class New(msgspec.Struct, frozen=True, kw_only=True, tag="thing"):
    a: int
    b: np.ndarray | None = None


def test_unknown_field_is_ignored_and_missing_one_takes_its_default() -> None:
    assert wire.decode(wire.encode(New(a=1, b=np.arange(3))), Old) == Old(a=1)
    assert wire.decode(wire.encode(Old(a=1)), New).b is None


def test_another_type_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="Trajectory"):
        wire.decode(wire.encode(golden_group()), Trajectory)


def test_a_decoded_value_is_checked_like_a_constructed_one() -> None:
    raw = msgspec.to_builtins(golden_group(), builtin_types=(np.ndarray, RoutingTrace))
    raw["size"] = 0
    with pytest.raises(WireError, match=r"Group\.size"):
        wire.decode(wire.encode(raw), Group)


@pytest.mark.parametrize("bad", [np.array(["x"]), np.zeros(1, np.complex64), object()])
def test_what_cannot_be_encoded_is_named(bad: object) -> None:
    with pytest.raises(WireError, match="cannot encode"):
        wire.encode({"x": bad})


def test_a_number_where_an_array_belongs() -> None:
    raw = msgspec.to_builtins(golden_group(), builtin_types=(np.ndarray, RoutingTrace))
    raw["trajectories"][0]["token_ids"] = 3
    with pytest.raises(WireError, match="expected an array"):
        wire.decode(wire.encode(raw), Group)


@given(
    st.sampled_from(
        [
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
        ]
    ),
    st.sampled_from([(), (0,), (3,), (2, 0, 4), (2, 3)]),
)
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, size=shape).astype(dtype)
    (back,) = wire.decode(wire.encode((array,)), tuple[np.ndarray])
    assert same(back, array)
    (big,) = wire.decode(wire.encode((array.T.astype(array.dtype.newbyteorder(">"), order="C").T,)), tuple[np.ndarray])
    assert same(big, array)


def framed(trace: RoutingTrace, **changes: int) -> bytes:
    """A frame whose trace entry says something else than its words do, with right checksums."""
    frame = bytearray(wire.encode([trace]))
    body = struct.unpack_from("<Q", frame, 8)[0]
    at = frame.index(struct.pack("<Q", trace.num_experts), 32, 32 + body) - 8
    names = ("offset", "experts", "rows", "layers", "top_k")
    values = dict(zip(names, struct.unpack_from("<5Q", frame, at), strict=True)) | changes
    struct.pack_into("<5Q", frame, at, *(values[n] for n in names))
    struct.pack_into("<I", frame, 24, zlib.crc32(frame[32:]))
    struct.pack_into("<I", frame, 28, zlib.crc32(frame[:28]))
    return bytes(frame)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 4000}, "outside the frame"),
        ({"offset": 32}, "outside the frame"),
        ({"experts": 0}, "at least one expert"),
        ({"experts": 2**40}, "at most"),
        ({"experts": 100}, "ids are < 100"),
        ({"rows": 2**63, "layers": 2**63}, "outside the frame"),
    ],
)
def test_a_trace_entry_that_contradicts_its_words_is_refused(changes: dict[str, int], reason: str) -> None:
    trace = RoutingTrace.of(np.full((5, 2, 3), 120), 128)
    assert same(wire.decode(framed(trace), list[RoutingTrace])[0], trace)
    with pytest.raises(WireError, match=reason):
        wire.decode(framed(trace, **changes), list[RoutingTrace])


def test_something_else_where_a_trace_belongs() -> None:
    with pytest.raises(WireError, match="expected a routing trace, got int"):
        wire.decode(wire.encode([3]), list[RoutingTrace])


def test_a_trace_takes_fewer_bytes_on_the_wire_than_in_memory() -> None:
    """128 experts need seven bits, 512 nine; 256 experts fill their bytes and travel as they are, uncopied."""
    for experts, share in ((128, 7 / 8), (512, 9 / 16), (8, 3 / 8)):
        trace = RoutingTrace.of(np.zeros((1000, 6, 8), np.int64), experts)
        assert len(wire.encode(trace)) <= share * trace.num_bytes + 256
    full = RoutingTrace.of(np.zeros((1000, 6, 8), np.int64), 256)
    parts = wire.encode_parts(full)
    assert any(np.shares_memory(np.frombuffer(p, np.uint8), full.expert_ids) for p in parts if len(p))
