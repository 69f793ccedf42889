"""Weight synchronisation against what the machine can do: every figure is a ratio of two times of the same run.

    python ci/benchmarks/sync.py [--mib 256] [--repeat 5] [--only NAME] [--json FILE]

Targets: local >= 0.5 of a memory copy including digests; broadcast >= 0.9 of raw gloo; peer-to-peer volume exactly the
minimum; an update of a few MB under 50 ms. Times are the best of the repetitions, because other work on the machine
only ever adds to them; broadcasts also show the mean processor time of all their processes, which other work hardly
changes. A broadcast is measured for tensors that lie side by side in memory, as a trainer's and a gather's do, and
for scattered ones, which are packed first.

`checkpoint-engine` is not among the peers: its version 0.4.2 on PyPI refuses a machine without an accelerator
("The current device type is not supported").
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_contracts import PauseMode, ShmBucket, TensorSpec, WeightManifest
from miles_contracts.alignment import aligned
from miles_sync import LocalReceiver, LocalSender, update_weights
from miles_sync.broadcast import BroadcastReceiver, BroadcastSender
from miles_sync.convert import scatter
from miles_sync.disk import DeltaPublisher, DeltaSubscriber, FolderStore
from miles_sync.group import Meeting
from miles_sync.layout import Layout, RankBuilder, Slice, whole
from miles_sync.peer import PeerReceiver, PeerSender
from miles_sync.peer.shared import SharedBackend
from miles_sync.peer.tcp import TcpBackend
from miles_sync.tensors import digest_bytes
from miles_sync.transfer import minimum_bytes, plan_transfers

FORK = multiprocessing.get_context("fork")
Weights = dict[str, torch.Tensor]
BUCKET_MIB = 32


def model(mib: int, seed: int = 0) -> Weights:
    """bfloat16 matrices of 4 MiB, and a few small tensors as every layer has them."""
    generator = torch.Generator().manual_seed(seed)
    block = (torch.randn(1024, 2048, generator=generator) * 0.02).to(torch.bfloat16)
    weights = {f"layers.{i:03d}.weight": (block + i * 1e-3).contiguous() for i in range(max(mib // 4, 1))}
    weights.update({f"layers.{i:03d}.norm": torch.ones(2048) for i in range(max(mib // 4, 1))})
    return dict(sorted(weights.items()))


def side_by_side(weights: Weights) -> Weights:
    """Copies in one block, as a trainer keeps its parameters and as a gather from shards produces them."""
    block = torch.empty(sum(aligned(t.nbytes) for t in weights.values()), dtype=torch.uint8)
    end, out = 0, {}
    for name, tensor in weights.items():
        out[name] = block[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        end += aligned(tensor.nbytes)
    return out


def manifest_of(weights: Weights, version: int = 1) -> WeightManifest:
    specs = (
        TensorSpec(name=n, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for n, t in weights.items()
    )
    return WeightManifest(version=version, tensors=tuple(specs))


def best(repeat: int, work: Callable[[], Any]) -> float:
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def num_bytes(weights: Weights) -> int:
    return sum(t.nbytes for t in weights.values())


def bench_local(weights: Weights, repeat: int) -> dict[str, float]:
    total, manifest = num_bytes(weights), manifest_of(weights)
    flat = np.concatenate([t.view(torch.uint8).reshape(-1).numpy() for t in weights.values()])
    target = np.zeros_like(flat)
    copy = best(repeat, lambda: np.copyto(target, flat))
    digest = best(repeat, lambda: digest_bytes(flat))

    def send(sender: LocalSender) -> None:
        for bucket in sender.send(weights.items(), manifest, "u"):
            sender.acknowledge("u", bucket.index)
        sender.release("u")

    out = {"memory_copy_gib_s": total / copy / 2**30, "digest_alone_gib_s": total / digest / 2**30}
    for name, digests in (("with_digests", True), ("without_digests", False)):
        with LocalSender(bucket_bytes=BUCKET_MIB << 20, digests=digests, receivers_copy=True) as sender:
            send(sender)
            out[f"send_{name}_vs_copy"] = copy / best(repeat, lambda s=sender: send(s))
    receiver = LocalReceiver()
    count = 0

    def both(sender: LocalSender) -> None:
        nonlocal count
        count += 1
        receiver.begin(f"u{count}", manifest)
        for bucket in sender.send(weights.items(), manifest, f"u{count}"):
            receiver.load(bucket)
            sender.acknowledge(f"u{count}", bucket.index)
        sender.release(f"u{count}")
        receiver.commit(f"u{count}")

    with LocalSender(bucket_bytes=BUCKET_MIB << 20, receivers_copy=True) as sender:
        both(sender)
        out["send_and_receive_verified_vs_two_copies"] = 2 * copy / best(repeat, lambda: both(sender))
    return out


class Workers:
    """Forked processes, one function each, that answer over pipes."""

    def __init__(self, count: int, serve: Callable[[int, Connection], None]) -> None:
        self.pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=serve, args=(number, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self._processes.append(process)

    def tell(self, message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def cpu_s(self) -> float:
        """Processor time of all of them and of this process so far."""
        ticks = 0
        for pid in [os.getpid(), *(process.pid for process in self._processes)]:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve_receiver(make: Callable[[int], Any]) -> Callable[[int, Connection], None]:
    def serve(number: int, pipe: Connection) -> None:
        gc.freeze()  # groups that the parent is done with must not be ended here: their threads are not
        receiver = make(number)
        while True:
            method, *arguments = pipe.recv()
            pipe.send(getattr(receiver, method) if method == "handle" else getattr(receiver, method)(*arguments))

    return serve


class RawGloo:
    """Bytes in buckets over a bare gloo group of this process and forked ones: what a broadcast is held against."""

    def __init__(self, total: int, receivers: int) -> None:
        self._sizes = [min(BUCKET_MIB << 20, total - at) for at in range(0, total, BUCKET_MIB << 20)]
        meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=60)
        port = meeting.port

        def serve(number: int, pipe: Connection) -> None:
            gc.freeze()  # groups that the parent is done with must not be ended here: their threads are not
            group = Meeting("127.0.0.1", port, owner=False, timeout_s=60).open("raw", number + 1, receivers + 1)
            memory = torch.empty(BUCKET_MIB << 20, dtype=torch.uint8)
            while True:
                for size in pipe.recv():
                    group.broadcast(memory[:size], 0)()
                pipe.send(True)

        self.pool = Workers(receivers, serve)
        self._group = meeting.open("raw", 0, receivers + 1)
        self._source = torch.zeros(BUCKET_MIB << 20, dtype=torch.uint8)

    def send(self) -> None:
        self.pool.tell(self._sizes)
        for size in self._sizes:
            self._group.broadcast(self._source[:size], 0)()
        self.pool.answers()


def bench_broadcast(weights: Weights, repeat: int, receivers: int) -> dict[str, float]:
    names, manifest = [f"r{i}" for i in range(receivers)], manifest_of(weights)
    raw = RawGloo(num_bytes(weights), receivers)
    out: dict[str, float] = {}
    senders = {}
    workers = {}
    together = side_by_side(weights)
    forms = {
        "with_digests": (True, together),
        "without_digests": (False, together),
        "scattered_with_digests": (True, weights),
    }
    for name, (digests, _) in forms.items():
        own = Meeting("127.0.0.1", 0, owner=True, timeout_s=60)
        workers[name] = Workers(receivers, _serve_receiver(lambda n: BroadcastReceiver(names[n], timeout_s=60)))
        senders[name] = BroadcastSender(own, names, BUCKET_MIB << 20, digests=digests)
    count = 0

    def send(name: str) -> None:
        nonlocal count
        count += 1
        pool, update_id = workers[name], f"u{count}"
        pool.tell(("begin", update_id, manifest))
        pool.answers()
        stream = senders[name].send(forms[name][1].items(), manifest, update_id)
        # Two buckets are on their way, as a transaction has it.
        loading = 0
        for bucket in stream:
            pool.tell(("load", bucket))
            loading += 1
            if loading == 2:
                pool.answers()
                loading = 1
        for _ in range(loading):
            pool.answers()
        pool.tell(("commit", update_id))
        pool.answers()

    works: dict[str, tuple[Workers, Callable[[], None]]] = {"raw_gloo": (raw.pool, raw.send)}
    works.update({f"broadcast_{name}": (workers[name], lambda n=name: send(n)) for name in senders})
    times: dict[str, list[float]] = {name: [] for name in works}
    used = dict.fromkeys(works, 0.0)
    # In turn, so that other work on the machine slows all of them; two rounds only warm up: a receiver's third
    # version is the first one that finds memory to use again.
    for number in range(repeat + 2):
        for name, (pool, work) in works.items():
            before = pool.cpu_s()
            taken = best(1, work)
            if number >= 2:
                times[name].append(taken)
                used[name] += (pool.cpu_s() - before) / repeat
    out.update({f"{name}_s": min(taken) for name, taken in times.items()})
    out.update({f"{name}_cpu_s": seconds for name, seconds in used.items()})
    for name in senders:
        out[f"broadcast_{name}_vs_raw"] = out["raw_gloo_s"] / out[f"broadcast_{name}_s"]
        out[f"broadcast_{name}_vs_raw_cpu"] = out["raw_gloo_cpu_s"] / out[f"broadcast_{name}_cpu_s"]
    raw.pool.close()
    for pool in workers.values():
        pool.close()
    return out


def tensor_parallel(weights: Weights, ranks: int) -> Layout:
    """Matrices cut along alternating dimensions, vectors whole."""
    specs, out = manifest_of(weights).tensors, []
    for rank in range(ranks):
        builder = RankBuilder()
        for number, spec in enumerate(specs):
            if len(spec.shape) == 2:
                builder.shard(Slice(spec=spec, dim=number // 2 % 2, index=rank, count=ranks))
            else:
                builder.keep(spec)
        out.append(builder.build())
    return Layout(tensors=specs, ranks=tuple(out))


def bench_peer(weights: Weights, repeat: int, receivers: int) -> dict[str, float]:
    source, target = whole(manifest_of(weights).tensors), tensor_parallel(weights, receivers)
    plan, manifest = plan_transfers(source, target), manifest_of(weights)
    out = {"volume_vs_minimum": plan.num_bytes / minimum_bytes(target), "volume_mib": plan.num_bytes / 2**20}
    for name, backend in (("tcp", TcpBackend()), ("shared_memory", SharedBackend())):
        pool = Workers(receivers, _serve_receiver(lambda n, b=backend: PeerReceiver(source, target, n, b)))
        pool.tell(("handle",))
        sender = PeerSender(source, target, 0, backend.writer(), pool.answers(), BUCKET_MIB << 20)
        stored = scatter(source, 0, weights)
        count = 0

        def send(pool: Workers = pool, sender: PeerSender = sender, stored: Weights = stored) -> None:
            nonlocal count
            count += 1
            pool.tell(("begin", f"u{count}", manifest))
            pool.answers()
            waiting = False
            for bucket in sender.send(stored, manifest, f"u{count}"):
                if waiting:
                    pool.answers()
                pool.tell(("load", bucket))
                waiting = True
            pool.answers()
            pool.tell(("commit", f"u{count}"))
            pool.answers()

        send()
        out[f"{name}_s"] = best(repeat, send)
        pool.close()
    return out


def step(weights: Weights, share: float, seed: int) -> Weights:
    """Change the last bit of a share of the elements."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in weights.items():
        bits = tensor.clone().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)
        flat = bits.reshape(-1).numpy()
        if share >= 1:
            flat ^= rng.integers(1, 4, flat.shape, dtype=flat.dtype)
        else:
            flat[rng.choice(len(flat), int(share * len(flat)), replace=False)] ^= 1
        out[name] = bits.view(tensor.dtype)
    return out


def entropy_bytes(weights: Weights, share: float) -> float:
    """What any code needs for a random choice of this share of the elements, and their change."""
    elements = sum(t.numel() for t in weights.values())
    if share >= 1:
        return elements * np.log2(3) / 8
    return elements * -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8


def bench_disk(weights: Weights) -> dict[str, float]:
    total, out = num_bytes(weights), {}
    root = Path(tempfile.mkdtemp(prefix="miles-bench-"))
    try:
        for share in (0.01, 0.05, 1.0):
            folder = root / str(share)
            (folder / "store").mkdir(parents=True)
            store = FolderStore(folder / "store")
            publisher, host = DeltaPublisher(store), DeltaSubscriber(store, folder / "host")
            publisher.publish(weights.items(), manifest_of(weights, 0))
            host.pull()
            after = step(weights, share, 1)
            begun = time.perf_counter()
            report = publisher.publish(after.items(), manifest_of(after, 1))
            published = time.perf_counter()
            host.pull()
            pulled = time.perf_counter()
            begun_full = time.perf_counter()
            store.put("plain/full", (t.view(torch.uint8).numpy().tobytes() for t in after.values()))
            full_s = time.perf_counter() - begun_full
            at = f"{share:.0%}"
            out[f"{at}_size_vs_full"] = report.num_bytes / total
            out[f"{at}_size_vs_entropy"] = report.num_bytes / entropy_bytes(weights, share)
            out[f"{at}_publish_vs_writing_full"] = (published - begun) / full_s
            out[f"{at}_pull_vs_writing_full"] = (pulled - published) / full_s
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return out


class PipeEngine:
    """The part of an engine that an update needs, over a pipe to its process."""

    def __init__(self, url: str, pipe: Connection) -> None:
        self.url, self._pipe, self._version = url, pipe, 0

    async def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return await asyncio.to_thread(self._pipe.recv)

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def weight_version(self) -> int | None:
        return self._version

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        await self._ask("begin", update_id, manifest)
        self._coming = manifest.version

    async def load_bucket(self, bucket: ShmBucket) -> None:
        await self._ask("load", bucket)

    async def commit_weight_update(self, update_id: str) -> None:
        await self._ask("commit", update_id)
        self._version = self._coming

    async def rollback_weight_update(self, update_id: str) -> None:
        await self._ask("rollback", update_id)


class Source:
    """The trainer's side, in this process."""

    def __init__(self, sender: LocalSender, weights: Weights) -> None:
        self._sender, self._weights, self._manifest = sender, weights, manifest_of(weights)

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self._manifest = manifest_of(self._weights, version)
        return f"u{version}", self._manifest

    async def buckets(self, update_id: str) -> AsyncIterator[ShmBucket]:
        for bucket in self._sender.send(self._weights.items(), self._manifest, update_id):
            yield bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        self._sender.acknowledge(update_id, index)

    async def release(self, update_id: str) -> None:
        self._sender.release(update_id)


def bench_fixed_cost(repeat: int) -> dict[str, float]:
    weights = model(4)
    pool = Workers(2, _serve_receiver(lambda _: LocalReceiver()))
    engines: Any = [PipeEngine(f"e{i}", pipe) for i, pipe in enumerate(pool.pipes)]

    async def run() -> list[float]:
        with LocalSender(receivers_copy=True) as sender:
            source = Source(sender, weights)
            totals = []
            for version in range(1, repeat + 2):
                report = await update_weights(engines, source, version=version, mode=PauseMode.RETRACT, deadline_s=60)
                totals.append(report.paused_s)
            return totals

    totals = asyncio.run(run())
    pool.close()
    return {"model_mib": num_bytes(weights) / 2**20, "pause_ms": 1000 * min(totals[1:]), "first_ms": 1000 * totals[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = model(options.mib)
    results: dict[str, dict[str, float]] = {}
    parts: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("fixed cost", lambda: bench_fixed_cost(options.repeat)),
        ("local", lambda: bench_local(weights, options.repeat)),
        ("broadcast, 2 receivers", lambda: bench_broadcast(weights, options.repeat, 2)),
        ("broadcast, 4 receivers", lambda: bench_broadcast(weights, options.repeat, 4)),
        ("peer-to-peer, 4 receivers", lambda: bench_peer(weights, options.repeat, 4)),
        ("disk-delta", lambda: bench_disk(weights)),
    ]
    for name, work in parts:
        if options.only not in name:
            continue
        results[name] = work()
        print(name, flush=True)
        for key, value in results[name].items():
            print(f"    {key:45} {value:10.3f}", flush=True)
    if not options.only:
        faster = results["broadcast, 4 receivers"]["broadcast_with_digests_s"]
        peer = results["peer-to-peer, 4 receivers"]
        print(f"peer-to-peer against broadcast, 4 receivers: {faster / peer['tcp_s']:.2f}x over TCP", end=", ")
        print(f"{faster / peer['shared_memory_s']:.2f}x over shared memory")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
