"""Frames over a socket: whole, in order, without a copy, and an end that is always noticed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from miles_contracts import WireError, wire
from miles_loop import frames
from miles_loop.frames import FrameAssembler, FrameLink


class Note(msgspec.Struct, frozen=True, tag="note", eq=False):
    """A message of these tests."""

    number: int
    values: NDArray[np.int32]


class Other(msgspec.Struct, frozen=True, tag="other"):
    """One that the reader does not expect."""


def note(number: int, count: int) -> Note:
    """With `count` values that tell it from others."""
    return Note(number, np.arange(count, dtype=np.int32) + number)


@given(st.lists(st.integers(0, 300), max_size=6), st.lists(st.integers(1, 700), min_size=1, max_size=40))
def test_frames_come_out_as_they_went_in_however_the_bytes_arrive(counts: list[int], pieces: list[int]) -> None:
    sent = [wire.encode(note(number, count)) for number, count in enumerate(counts)]
    stream, assembler, found = b"".join(sent), FrameAssembler(), []
    turn = 0
    while stream:
        room = assembler.room
        size = min(pieces[turn % len(pieces)], len(room), len(stream))
        room[:size] = stream[:size]
        stream, turn = stream[size:], turn + 1
        if (frame := assembler.filled(size)) is not None:
            found.append(bytes(frame))
    assert found == sent
    assert len(assembler.room) == 32, "nothing of another frame has begun"


def test_arrays_are_views_of_the_buffer_that_was_received_into() -> None:
    assembler, data = FrameAssembler(), wire.encode(note(1, 1000))
    frame = None
    while frame is None:
        room = assembler.room
        room[:], data = data[: len(room)], data[len(room) :]
        frame = assembler.filled(len(room))
    values = wire.decode(frame, Note).values
    assert np.shares_memory(values, np.frombuffer(frame, dtype=np.uint8))
    assert not values.flags.writeable


def test_what_is_no_frame_is_refused_at_its_header() -> None:
    assembler = FrameAssembler()
    assembler.room[:] = b"GET / HTTP/1.1\r\n".ljust(32)
    with pytest.raises(WireError, match="not a Miles frame"):
        assembler.filled(32)


class Ends:
    """Two linked ends and what each of them got."""

    def __init__(self, left: FrameLink[Note], right: FrameLink[Note], got: tuple[list[Note], list[Note]]) -> None:
        self.left, self.right = left, right
        self.at_left, self.at_right = got


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    here, there = socket.socketpair()
    got: tuple[list[Note], list[Note]] = ([], [])
    left: FrameLink[Note] = await FrameLink.open(here, Note, got[0].append)
    right: FrameLink[Note] = await FrameLink.open(there, Note, got[1].append)
    yield Ends(left, right, got)
    await left.close()
    await right.close()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a test looks from outside
            await asyncio.sleep(0.001)


async def test_messages_of_all_sizes_keep_their_order_both_ways(ends: Ends) -> None:
    counts = [0, 600_000, 1, 10, 300_000, 2]  # the large ones are decoded in a thread
    for number, count in enumerate(counts):
        ends.left.send(note(number, count))
        ends.right.send(note(100 + number, count))
    await until(lambda: len(ends.at_left) == len(ends.at_right) == len(counts))
    assert [(m.number, len(m.values)) for m in ends.at_right] == list(enumerate(counts))
    assert [m.number for m in ends.at_left] == [100 + number for number in range(len(counts))]
    assert all((m.values == np.arange(len(m.values)) + m.number).all() for m in ends.at_right)
    assert ends.left.received == len(counts)


async def test_everything_that_arrived_is_delivered_before_the_end(ends: Ends) -> None:
    for number in range(50):
        ends.left.send(note(number, 5))
    await until(lambda: len(ends.at_right) > 0)
    for number in range(50, 60):
        ends.left.send(note(number, 5))
    await asyncio.sleep(0)
    await ends.left.close()
    assert "closed the connection" in await ends.right.ended
    assert [m.number for m in ends.at_right] == list(range(len(ends.at_right)))
    assert await ends.left.ended == "it was closed here"
    ends.left.send(note(1, 1))  # nothing happens


async def test_a_peer_cannot_fill_the_memory(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_INBOX_FRAMES", 2)
    paused, decode = threading.Event(), wire.decode
    transport = ends.right._transport
    assert transport is not None
    pause = transport.pause_reading
    monkeypatch.setattr(transport, "pause_reading", lambda: (paused.set(), pause()))

    def slowly(frame: bytearray, kind: type[Note]) -> Note:
        if len(frame) > 2**20:  # while this one is decoded in a thread, the others arrive
            paused.wait(10)
        return decode(frame, kind)

    monkeypatch.setattr(wire, "decode", slowly)
    ends.left.send(note(0, 600_000))
    for number in range(1, 300):
        ends.left.send(note(number, 2000))
    await until(lambda: len(ends.at_right) == 300)
    assert paused.is_set()
    assert [m.number for m in ends.at_right] == list(range(300))


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"x" * 64, "no message"), (wire.encode(Other()), "cannot be read"), (wire.encode(note(1, 9))[:-8], "closed")],
)
async def test_a_foreign_or_broken_message_ends_the_connection_by_name(data: bytes, why: str) -> None:
    here, there = socket.socketpair()
    got: list[Note] = []
    link: FrameLink[Note] = await FrameLink.open(here, Note, got.append)
    there.sendall(data)
    there.shutdown(socket.SHUT_WR)
    assert why in await link.ended
    assert not got
    await link.close()
    there.close()
