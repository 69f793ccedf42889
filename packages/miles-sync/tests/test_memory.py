"""Memory of an update, measured: bounded by buckets, whatever the model's size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sync_fleet import manifest_of
from sync_processes import FORK, forked

from miles_contracts import TensorSpec, WeightManifest
from miles_sync import LocalSender
from miles_sync.broadcast import BroadcastSender
from miles_sync.group import Meeting

MIB = 1 << 20
BUCKET = 8 * MIB


def resident_bytes() -> int:
    """Private and shared memory of this process now, without the pages of program files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def measure(queue: object, count: int) -> None:
    """Send `count` tensors of 4 MiB and one that is split, after a small update that warms everything up."""
    forked()
    sizes = [4 * MIB] * count + [3 * BUCKET]
    specs = [TensorSpec(name=f"w{i:04d}", dtype="uint8", shape=(size,)) for i, size in enumerate(sizes)]
    tensors = {s.name: torch.full(s.shape, i % 251, dtype=torch.uint8) for i, s in enumerate(specs)}
    with LocalSender(Path("/dev/shm"), BUCKET, receivers_copy=True) as sender:
        list(sender.send([("w", torch.zeros(MIB))], manifest_of({"w": torch.zeros(MIB)}, 1), "warm"))
        sender.release("warm")
        before = peak = resident_bytes()
        for bucket in sender.send(tensors.items(), WeightManifest(version=1, tensors=tuple(specs)), "u"):
            peak = max(peak, resident_bytes())
            if bucket.index:
                sender.acknowledge("u", bucket.index - 1)
    queue.put(peak - before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [8, 64])
def test_a_sender_holds_two_buckets_above_the_model(count: int) -> None:
    queue = FORK.Queue()
    process = FORK.Process(target=measure, args=(queue, count))
    process.start()
    above = queue.get(timeout=60)
    process.join()
    assert above <= 2 * BUCKET + MIB


def receive_broadcasts(port: int, buckets: object) -> None:
    """Take part in every collective, with one buffer; what comes is dropped."""
    group = None
    while (bucket := buckets.get()) is not None:  # type: ignore[attr-defined]
        if group is None:
            group = Meeting("127.0.0.1", port, owner=False, timeout_s=60).open(bucket.group, 1, 2)
        memory = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        for begin, length in bucket.transfers:
            group.broadcast(memory[begin : begin + length], 0)()


def measure_broadcast(queue: object, count: int) -> None:
    """As `measure`, over a group with one receiver in a process of its own."""
    forked()
    meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=60)
    buckets = FORK.Queue()
    receiver = FORK.Process(target=receive_broadcasts, args=(meeting.port, buckets), daemon=True)
    receiver.start()
    sizes = [4 * MIB] * count + [3 * BUCKET]
    specs = [TensorSpec(name=f"w{i:04d}", dtype="uint8", shape=(size,)) for i, size in enumerate(sizes)]
    tensors = {s.name: torch.full(s.shape, i % 251, dtype=torch.uint8) for i, s in enumerate(specs)}
    sender = BroadcastSender(meeting, ["r"], BUCKET)
    small = manifest_of({"w": torch.zeros(MIB)}, 1)
    for bucket in sender.send([("w", torch.zeros(MIB))], small, "warm"):
        buckets.put(bucket)
    before = peak = resident_bytes()
    for bucket in sender.send(tensors.items(), WeightManifest(version=1, tensors=tuple(specs)), "u"):
        buckets.put(bucket)
        peak = max(peak, resident_bytes())
    buckets.put(None)
    receiver.join(30)
    queue.put(peak - before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [8, 64])
def test_a_broadcasting_sender_holds_two_buckets_above_the_model(count: int) -> None:
    queue = FORK.Queue()
    process = FORK.Process(target=measure_broadcast, args=(queue, count))
    process.start()
    above = queue.get(timeout=120)
    process.join()
    assert above <= 2 * BUCKET + MIB
