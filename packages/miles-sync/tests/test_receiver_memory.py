"""Receivers put an update where the version before the last one was."""

from __future__ import annotations

import gc

import numpy as np
import torch
from sync_fleet import manifest_of

from miles_sync.staging import Receiver
from miles_sync.tensors import from_bytes, spec_of

MIB = 1 << 20


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
