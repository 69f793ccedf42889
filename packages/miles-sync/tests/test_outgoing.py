from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import TensorSpec, digest
from miles_contracts.alignment import aligned
from miles_sync import plan_buckets
from miles_sync.buckets import Bucket
from miles_sync.outgoing import Outgoing

MEMORY = 4096


def uint8_specs(sizes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(name=f"t{i}", dtype="uint8", shape=(size,)) for i, size in enumerate(sizes)]


def bucket_of(sizes: list[int]) -> Bucket:
    (bucket,) = plan_buckets(uint8_specs(sizes), 1 << 20)
    return bucket


class Wire:
    """Notes what is sent, and from where."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def start(self, data: torch.Tensor) -> None:
        self.sent.append(data)

    def received(self, outgoing: Outgoing) -> bytes:
        memory = bytearray(outgoing.num_bytes)
        for (begin, length), data in zip(outgoing.transfers, self.sent, strict=True):
            assert len(data) == length
            memory[begin : begin + length] = data.numpy().tobytes()
        return bytes(memory)


def send(
    bucket: Bucket, pieces: list[torch.Tensor], in_place: int, transfer: int
) -> tuple[Outgoing, Wire, torch.Tensor]:
    wire, packed = Wire(), torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    outgoing = Outgoing(wire.start, packed, digests=True, in_place_bytes=in_place, transfer_bytes=transfer)
    for piece, data in zip(bucket.pieces, pieces, strict=True):
        assert outgoing.put(piece, data) == digest(data.numpy())
    outgoing.finish()
    return outgoing, wire, packed


def inside(data: torch.Tensor, block: torch.Tensor) -> bool:
    return block.data_ptr() <= data.data_ptr() < block.data_ptr() + max(block.nbytes, 1)


@st.composite
def placed(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors side by side with the alignment's gaps, with other gaps, backwards, and in blocks of their own."""
    blocks = [torch.randint(0, 256, (MEMORY,), dtype=torch.uint8) for _ in range(2)]
    pieces, end, block = [], 0, blocks[0]
    for size in draw(st.lists(st.integers(0, 300), min_size=1, max_size=12)):
        where = draw(st.sampled_from(["beside", "beside", "beside", "apart", "back", "other block", "own block"]))
        if where == "own block":
            pieces.append(torch.randint(0, 256, (size,), dtype=torch.uint8))
            continue
        if where == "other block":
            block = blocks[0] if block is blocks[1] else blocks[1]
        begin = {"apart": end + 64, "back": 0}.get(where, end)
        if begin + size > MEMORY:
            begin = 0
        pieces.append(block[begin : begin + size])
        end = aligned(begin + size)
    return pieces


@given(pieces=placed(), in_place=st.integers(1, 600), transfer=st.integers(1, 600))
def test_every_piece_arrives_where_it_is_said_to_lie(pieces: list[torch.Tensor], in_place: int, transfer: int) -> None:
    bucket = bucket_of([len(p) for p in pieces])
    outgoing, wire, packed = send(bucket, pieces, in_place, transfer)
    memory = wire.received(outgoing)
    assert outgoing.num_bytes <= aligned(bucket.num_bytes)  # so never more than a bucket's capacity
    end = 0
    for begin, length in outgoing.transfers:
        assert begin == aligned(end)
        end = begin + length
    for piece, offset in zip(pieces, outgoing.offsets, strict=True):
        assert offset % 64 == 0
        assert memory[offset : offset + len(piece)] == piece.numpy().tobytes()
        assert any(b <= offset <= offset + len(piece) <= b + n for b, n in outgoing.transfers)
    spans = sorted((at, at + len(p)) for at, p in zip(outgoing.offsets, pieces, strict=True) if len(p))
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    for data in wire.sent:
        assert len(data) >= in_place or not len(data) or inside(data, packed)


def test_what_lies_side_by_side_is_one_transfer_from_where_it_is() -> None:
    block = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    pieces = [block[0:100], block[128:328], block[384:500], torch.arange(9, dtype=torch.uint8)]
    outgoing, wire, packed = send(bucket_of([100, 200, 116, 9]), pieces, in_place=256, transfer=10_000)
    assert outgoing.transfers == [(0, 500), (512, 9)]
    assert outgoing.offsets == [0, 128, 384, 512]
    assert wire.sent[0].data_ptr() == block.data_ptr()
    assert inside(wire.sent[1], packed)


def test_a_full_transfer_starts_before_the_next_piece_is_asked_for() -> None:
    block = torch.zeros(1024, dtype=torch.uint8)
    bucket = bucket_of([256, 256, 256])
    wire, started = Wire(), []
    outgoing = Outgoing(
        wire.start, torch.zeros(1024, dtype=torch.uint8), digests=False, in_place_bytes=64, transfer_bytes=256
    )
    for piece in bucket.pieces:
        outgoing.put(piece, block[piece.offset : piece.offset + 256])
        started.append(len(wire.sent))
    outgoing.finish()
    assert started == [1, 2, 3]
    assert outgoing.transfers == [(0, 256), (256, 256), (512, 256)]


def test_neighbours_in_different_storages_are_never_joined() -> None:
    """Addresses that happen to follow each other say nothing about what lies behind a storage's end."""
    block = np.zeros(512, np.uint8)
    pieces = [torch.from_numpy(block[:256]), torch.from_numpy(block[256:])]
    assert pieces[0].data_ptr() + 256 == pieces[1].data_ptr()
    outgoing, _, _ = send(bucket_of([256, 256]), pieces, in_place=256, transfer=10_000)
    assert outgoing.transfers == [(0, 256), (256, 256)]
