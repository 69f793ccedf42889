"""Memory of an update, measured as the kernel counts it: bounded by buckets, whatever the model's size.

A sender runs in a process of its own. Its peak is the high-water mark of its resident memory, which a write to
`clear_refs` sets back, so that nothing between two looks is missed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_processes import FORK, forked

from miles_contracts import TensorSpec, WeightManifest
from miles_sync import LocalReceiver, LocalSender
from miles_sync.broadcast import BroadcastReceiver, BroadcastSender
from miles_sync.disk import DeltaPublisher, DiskSender, FolderStore
from miles_sync.group import Meeting
from miles_sync.handing import HandingSender
from miles_sync.layout import Layout, RankBuilder, Slice, whole
from miles_sync.messages import handle_name
from miles_sync.peer import PeerReceiver, PeerSender
from miles_sync.peer.tcp import TcpBackend

MIB = 1 << 20
BUCKET = 8 * MIB
LARGEST = 3 * BUCKET
SLACK = 2 * MIB
"""For code and small objects that come into memory meanwhile."""

Tensors = dict[str, torch.Tensor]
Export = Callable[[Tensors], Iterator[tuple[str, torch.Tensor]]]


def resident(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since it was set back."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def peak_above(work: Callable[[], None]) -> int:
    """Resident bytes at the peak of `work` above those before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def model(count: int) -> Tensors:
    """`count` tensors of 4 MiB, as many bytes in small ones, and one of three buckets; half of them compress well."""
    sizes = [4 * MIB] * count + [MIB // 2] * (8 * count) + [LARGEST]
    noise = torch.randint(0, 256, (LARGEST,), dtype=torch.uint8)
    flat = (
        noise[:size] ^ i if i % 2 else torch.full((size,), i % 251, dtype=torch.uint8) for i, size in enumerate(sizes)
    )
    return {f"w{i:04d}": tensor.view(-1, 1024) for i, tensor in enumerate(flat)}


def manifest(tensors: Tensors) -> WeightManifest:
    specs = (TensorSpec(name=n, dtype="uint8", shape=tuple(t.shape)) for n, t in tensors.items())
    return WeightManifest(version=1, tensors=tuple(specs))


def live(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own tensors, as a trainer that holds them whole exports them."""
    yield from tensors.items()


def made_anew(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that exist for the export only, as those that are gathered from shards."""
    for name, tensor in tensors.items():
        yield name, tensor.clone()


def send(sender: Any, tensors: Tensors, export: Export, announce: Callable[[Any], None]) -> None:
    """One update; a bucket is acknowledged when the next one is announced, as the driver does it."""
    previous = None
    for bucket in sender.send(export(tensors), manifest(tensors), "u"):
        announce(bucket)
        if previous is not None:
            sender.acknowledge("u", previous)
        previous = bucket.index
    sender.release("u")


def receive(queue: Queue[Any], receiver: Callable[[], Any]) -> None:
    """A receiver's process: loads what is announced until None comes, into one model's worth of memory."""
    forked()
    taker = receiver()
    if isinstance(taker, PeerReceiver):
        queue.put(taker.handle)
    taker.begin("u", queue.get())
    while (bucket := queue.get()) is not None:
        taker.load(bucket)


def local(tensors: Tensors, export: Export) -> int:
    with LocalSender(Path("/dev/shm"), BUCKET, receivers_copy=True) as sender:
        return peak_above(lambda: send(sender, tensors, export, lambda _: None))


def by_handle(tensors: Tensors, export: Export) -> int:
    sender = HandingSender(Path("/dev/shm"), BUCKET)
    sender.set_receivers([handle_name("engine", rank, "cpu") for rank in range(2)])
    peak = peak_above(lambda: send(sender, tensors, export, lambda _: None))
    sender.close()
    return peak


def broadcast(tensors: Tensors, export: Export, *, split: bool = True) -> int:
    meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=60)
    queue: Queue[Any] = FORK.Queue()
    receiver = FORK.Process(target=receive, args=(queue, lambda: BroadcastReceiver("r", timeout_s=60)), daemon=True)
    receiver.start()
    queue.put(manifest(tensors))
    sender = BroadcastSender(meeting, ["r"], BUCKET, split=split)
    peak = peak_above(lambda: send(sender, tensors, export, queue.put))
    queue.put(None)
    receiver.join(30)
    return peak


def packed_broadcast(tensors: Tensors, export: Export) -> int:
    return broadcast(tensors, export, split=False)


def halves(specs: tuple[TensorSpec, ...]) -> Layout:
    """Two ranks with half of every tensor's columns."""
    ranks = []
    for rank in range(2):
        builder = RankBuilder()
        for spec in specs:
            builder.shard(Slice(spec=spec, dim=1, index=rank, count=2))
        ranks.append(builder.build())
    return Layout(tensors=specs, ranks=tuple(ranks))


def peer(tensors: Tensors, export: Export, *, ranks: int = 1) -> int:
    source = whole(manifest(tensors).tensors, ranks)
    target = halves(source.tensors)
    receivers, handles = [], []
    for rank in range(2):
        queue, make = FORK.Queue(), partial(PeerReceiver, source, target, rank, TcpBackend())
        process = FORK.Process(target=receive, args=(queue, make), daemon=True)
        process.start()
        handles.append(queue.get())
        queue.put(manifest(tensors))
        receivers.append((process, queue))
    sender = PeerSender(source, target, 0, TcpBackend().writer(), handles, BUCKET)

    def announce(bucket: Any) -> None:
        for _, queue in receivers:
            queue.put(bucket)

    peak = peak_above(lambda: send(sender, tensors, export, announce))
    announce(None)
    for process, _ in receivers:
        process.join(30)
    return peak


def disk(tensors: Tensors, export: Export) -> int:
    with tempfile.TemporaryDirectory() as folder:
        sender = DiskSender(DeltaPublisher(FolderStore(Path(folder)), chunk_bytes=MIB, part_bytes=BUCKET))
        return peak_above(lambda: send(sender, tensors, export, lambda _: None))


def measure(answers: Queue[int], sending: Callable[[Tensors, Export], int], count: int, export: Export) -> None:
    forked()
    tensors = model(count)
    sending({"w": torch.zeros(1024, 1024, dtype=torch.uint8)}, export)  # what the first update loads once
    answers.put(sending(tensors, export))


# What is made anew is freed again and again, and the allocator keeps some of it: hence more than what is alive at once.
BOUNDS: dict[str, tuple[Callable[[Tensors, Export], int], Export, Callable[[int], int]]] = {
    "local": (local, live, lambda _: 2 * BUCKET),
    "local, made anew": (local, made_anew, lambda _: 2 * BUCKET + 3 * LARGEST),
    "by handle to SGLang": (by_handle, live, lambda _: 2 * LARGEST),
    "broadcast": (broadcast, live, lambda _: 2 * BUCKET),
    "broadcast, made anew": (broadcast, made_anew, lambda _: 2 * BUCKET + 3 * LARGEST),
    "broadcast to SGLang": (packed_broadcast, live, lambda _: 2 * LARGEST),
    "peer": (peer, live, lambda _: 2 * BUCKET),
    "peer, one of two ranks": (partial(peer, ranks=2), live, lambda _: 2 * BUCKET),
    "disk": (disk, live, lambda size: size + 4 * BUCKET),
}


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_sender_holds_no_more_above_the_model_than_is_said(name: str, count: int) -> None:
    sending, export, bound = BOUNDS[name]
    answers: Queue[int] = FORK.Queue()
    process = FORK.Process(target=measure, args=(answers, sending, count, export))
    process.start()
    process.join()
    peak = answers.get(timeout=10)
    assert peak <= bound(count * 8 * MIB + LARGEST) + SLACK


def hold(answers: Queue[int], size: int, updates: int) -> None:
    """A receiver that is updated again and again; answers with what it holds above nothing at the most."""
    forked()
    tensors = {f"w{i:02d}": torch.full((2 * MIB,), i, dtype=torch.uint8) for i in range(size // (2 * MIB))}
    announced = manifest(tensors)
    with LocalSender(Path("/dev/shm"), BUCKET, receivers_copy=True) as sender:
        receiver = LocalReceiver()

        def work() -> None:
            for number in range(updates):
                update_id = f"u{number}"
                receiver.begin(update_id, announced)
                for bucket in sender.send(tensors.items(), announced, update_id):
                    receiver.load(bucket)
                    sender.acknowledge(update_id, bucket.index)
                sender.release(update_id)
                receiver.commit(update_id)

        answers.put(peak_above(work))


def test_a_receiver_holds_the_model_twice_however_often_it_is_updated() -> None:
    size, answers = 64 * MIB, FORK.Queue()
    process = FORK.Process(target=hold, args=(answers, size, 6))
    process.start()
    process.join()
    peak = answers.get(timeout=10)
    # The sender's buckets, and its mapping in the receiver, are counted here as well.
    assert 2 * size <= peak <= 2 * size + 3 * BUCKET + SLACK
