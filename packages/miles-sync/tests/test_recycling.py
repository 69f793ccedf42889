"""Memory that is used again: only when nobody can see it, and within bounds."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_fleet import manifest_of

from miles_sync.recycling import Recycler
from miles_sync.staging import Receiver
from miles_sync.tensors import from_bytes, spec_of

MIB = 1 << 20


def test_memory_comes_back_with_the_last_view_of_it() -> None:
    memory = Recycler()
    array = memory.take(MIB)
    address = array.ctypes.data
    tensor = torch.from_numpy(array[64:128]).view(torch.float32)
    del array
    assert memory.take(MIB).ctypes.data != address
    tensor += 1
    del tensor
    assert address in {memory.take(MIB).ctypes.data for _ in range(2)}


def test_arrays_are_ordinary_writable_bytes() -> None:
    for size in (0, 10, MIB):
        array = Recycler().take(size)
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


def update(receiver: Receiver, version: int, value: float) -> None:
    weights = {"w": torch.full((MIB,), value)}
    receiver.begin(f"u{version}", manifest_of(weights, version))
    data = weights["w"].view(torch.uint8).numpy()
    receiver.staging(f"u{version}").put(spec_of("w", weights["w"]), data, None, 0)
    receiver.commit(f"u{version}")


def test_an_update_is_put_where_the_version_before_the_last_was() -> None:
    receiver, addresses = Receiver(), []
    for version in range(1, 7):
        update(receiver, version, version)
        addresses.append(receiver.tensors["w"].data_ptr())
    assert addresses == addresses[:2] * 3
    assert receiver.memory.num_bytes == receiver.tensors["w"].nbytes


def test_a_version_that_somebody_still_holds_is_not_written_over() -> None:
    receiver = Receiver()
    update(receiver, 1, 1)
    held = receiver.tensors["w"]
    for version in (2, 3, 4):
        update(receiver, version, version)
    assert (held == 1).all()
    assert (receiver.tensors["w"] == 4).all()


def test_a_rolled_back_update_leaves_its_memory_for_the_next() -> None:
    receiver = Receiver()
    update(receiver, 1, 1)
    spec = spec_of("w", receiver.tensors["w"])
    for number in range(3):
        receiver.begin(f"failed{number}", manifest_of(receiver.tensors, 2))
        receiver.staging(f"failed{number}").put(spec, np.zeros(spec.num_bytes, np.uint8), None, 0)
        receiver.rollback(f"failed{number}")
    gc.collect()
    assert receiver.memory.num_bytes == spec.num_bytes
    assert (receiver.tensors["w"] == 1).all()
    assert from_bytes(receiver.memory.take(spec.num_bytes), spec).shape == (MIB,)
