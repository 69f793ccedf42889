"""Memory that is used again: only when nobody can see it, and within bounds."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts.recycling import Recycler, _rounded

MIB = 1 << 20


def test_memory_comes_back_with_the_last_view_of_it() -> None:
    memory = Recycler()
    array = memory.take(MIB)
    address = array.ctypes.data
    view = memoryview(array[64:128].view(np.float32))
    del array
    assert memory.take(MIB).ctypes.data != address
    view[3] = 1.0
    del view
    assert address in {memory.take(MIB).ctypes.data for _ in range(2)}


def test_arrays_are_ordinary_writable_bytes() -> None:
    for size in (0, 10, 65_000, MIB):
        array = Recycler().take(size)
        assert not size or array.ctypes.data % 64 == 0
        assert (array.dtype, array.shape) == (np.dtype(np.uint8), (size,))
        array[:] = 3
        assert array.flags.c_contiguous
        assert int(array.sum()) == 3 * size


@given(steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), max_size=60))
def test_nobody_ever_gets_memory_that_somebody_holds(steps: list[tuple[int, int]]) -> None:
    memory, held, most = Recycler(), [], 0
    for number, (size, victim) in enumerate(steps):
        array = memory.take(size * MIB // 4)
        array[::4096] = number
        held.append((array, number))
        del array
        most = max(most, sum(len(kept) for kept, _ in held))
        if victim < len(held):
            del held[victim]
        # No loop variable: it would hold the last array on.
        assert all((kept[::4096] == expected).all() for kept, expected in held)
        assert memory.num_bytes + sum(len(kept) for kept, _ in held) <= most


def test_blocks_of_sizes_that_are_not_asked_for_any_more_make_room() -> None:
    memory = Recycler()
    for size in (MIB, 2 * MIB, 3 * MIB, 5 * MIB):
        array = memory.take(size)
        del array
    assert memory.num_bytes == 5 * MIB


def test_views_that_end_on_other_threads_are_noticed() -> None:
    memory = Recycler()
    arrays = [memory.take(MIB) for _ in range(8)]
    threads = [threading.Thread(target=arrays.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.num_bytes == 8 * MIB


def test_blocks_of_about_the_same_size_are_one_another() -> None:
    """Or a bucket that is used for a moment would cost another one's memory, and that one the next one's."""
    memory = Recycler()
    sizes = [32 * MIB, 30 * MIB - 64, 29 * MIB, 31 * MIB + 4096]
    addresses = set()
    for size in sizes * 2:
        array = memory.take(size)
        assert len(array) == size
        addresses.add(array.ctypes.data)
        del array
    assert len(addresses) == 1
    assert memory.num_bytes == 32 * MIB


@given(num_bytes=st.integers(64 * 1024, 1 << 40))
def test_rounding_adds_less_than_a_quarter(num_bytes: int) -> None:
    rounded = _rounded(num_bytes)
    assert num_bytes <= rounded < num_bytes * 1.25
    assert _rounded(rounded) == rounded
