"""Engines and trainers in processes of their own, driven over pipes: what every transport's conformance runs on.

Children are forked, so they start in milliseconds. Only metadata goes through the pipes.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sync_fleet import manifest_of

from miles_contracts import (
    EngineUnavailableError,
    GenerateResult,
    PauseMode,
    SamplingParams,
    WeightManifest,
    WeightUpdateError,
)

FORK = multiprocessing.get_context("fork")


class Child:
    """A forked process that answers calls of methods of one object."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, self._pipe, make), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """The method's result; its WeightUpdateError is raised here, a dead process is EngineUnavailableError."""
        try:
            with self._lock:
                self._pipe.send((method, args))
                kind, *rest = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineUnavailableError(self.name, "the process is dead") from error
        if kind == "refused":
            raise WeightUpdateError(rest[0], engine=self.name, tensor=rest[1])
        if kind == "failed":
            raise RuntimeError(rest[0])
        return rest[0]

    async def ask(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(self.call, method, *args)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.join()

    def stop(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()


def forked() -> None:
    """To be called first in a forked process: what the parent left behind must not be collected here.

    Ending a process group waits for its threads, which are in the parent only.
    """
    gc.freeze()


def _serve(pipe: Connection, other: Connection, make: Callable[[], Any]) -> None:
    forked()
    other.close()
    target = make()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[Any, ...] = ("done", getattr(target, method)(*args))
        except WeightUpdateError as error:
            answer = ("refused", error.reason, error.tensor)
        except Exception as error:  # noqa: BLE001 - request boundary of the child
            answer = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(answer)


class EngineSide:
    """In an engine's process: a receiver, and whether it is paused. `die_at` kills the process inside a call."""

    def __init__(self, receiver: Any) -> None:
        self.receiver = receiver
        self.paused = False
        self.die_at = ""
        self.refuse_at = ""

    def arm(self, die_at: str, refuse_at: str) -> None:
        self.die_at, self.refuse_at = die_at, refuse_at

    def do(self, what: str, *args: Any) -> Any:
        if self.die_at == what:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refuse_at == what:
            raise WeightUpdateError(f"refused to {what}")
        if what.startswith("load"):
            return self.receiver.load(*args)
        return getattr(self.receiver, what)(*args)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def state(self) -> tuple[int | None, bool, dict[str, tuple[str, tuple[int, ...], bytes]]]:
        tensors = {
            n: (str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for n, t in self.receiver.tensors.items()
        }
        return self.receiver.version, self.paused, tensors

    def version(self) -> int | None:
        version: int | None = self.receiver.version
        return version

    def handle(self) -> str:
        handle: str = self.receiver.handle
        return handle


class ProcessEngine:
    """`miles_contracts.Engine` over a child process."""

    def __init__(self, url: str, make_receiver: Callable[[], Any]) -> None:
        self.url = url
        self.child = Child(url, lambda: EngineSide(make_receiver()))

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        raise NotImplementedError

    async def abort(self, request_id: str | None = None) -> None:
        raise NotImplementedError

    async def flush_cache(self) -> None:
        raise NotImplementedError

    async def load_from_disk(self, path: Path, version: int) -> None:
        raise NotImplementedError

    async def healthy(self) -> bool:
        return True

    async def pause(self, mode: PauseMode) -> None:
        await self.child.ask("pause")

    async def resume(self) -> None:
        await self.child.ask("resume")

    async def weight_version(self) -> int | None:
        version: int | None = await self.child.ask("version")
        return version

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        await self.child.ask("do", "begin", update_id, manifest)

    async def load_bucket(self, bucket: Any) -> None:
        await self.child.ask("do", f"load {bucket.index}", bucket)

    async def commit_weight_update(self, update_id: str) -> None:
        await self.child.ask("do", "commit", update_id)

    async def rollback_weight_update(self, update_id: str) -> None:
        await self.child.ask("do", "rollback", update_id)


class TrainerSide:
    """In a trainer rank's process: weights of a seed, and a sender. `die_at` kills the process before a bucket.

    Args:
        sender: of the transport.
        weights: canonical weights of a seed.
        stored: what this rank gives to the sender, made of the canonical weights.
    """

    def __init__(
        self, sender: Any, weights: Callable[[int], dict[str, torch.Tensor]], stored: Callable[..., Any]
    ) -> None:
        self.sender, self.weights, self.stored = sender, weights, stored
        self.seed = 0
        self.die_at = -1
        self.corrupt = ""
        self._manifest: WeightManifest | None = None
        self._buckets: Iterator[Any] = iter(())

    def configure(self, seed: int, die_at: int, corrupt: str) -> None:
        self.seed, self.die_at, self.corrupt = seed, die_at, corrupt

    def begin(self, version: int, update_id: str) -> WeightManifest:
        weights = self.weights(self.seed)
        self._manifest = manifest_of(weights, version)
        self._buckets = self.sender.send(self.stored(weights), self._manifest, update_id)
        return self._manifest

    def next(self) -> Any:
        bucket = next(self._buckets, None)
        if bucket is not None and bucket.index == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return _with_wrong_digest(bucket, self.corrupt)

    def acknowledge(self, update_id: str, index: int) -> None:
        self.sender.acknowledge(update_id, index)

    def release(self, update_id: str) -> None:
        self.sender.release(update_id)

    def set_receivers(self, names: Sequence[str]) -> None:
        self.sender.set_receivers(names)

    def set_handle(self, rank: int, handle: str) -> None:
        self.sender.handles[rank] = handle


def _with_wrong_digest(bucket: Any, tensor: str) -> Any:
    """The announcement with another digest for one tensor: to a receiver the same as wrong bits."""
    import msgspec

    if bucket is None or not tensor or not hasattr(bucket, "tensors"):
        return bucket
    placed = tuple(
        msgspec.structs.replace(p, spec=msgspec.structs.replace(p.spec, digest="xxh3_128:" + "0" * 32))
        if p.spec.name == tensor
        else p
        for p in bucket.tensors
    )
    return msgspec.structs.replace(bucket, tensors=placed)


class ProcessSource:
    """`UpdateSource` over the processes of all trainer ranks; their rounds are merged."""

    def __init__(self, ranks: Sequence[Child], merge: Callable[[Sequence[Any]], Any] | None = None) -> None:
        self.ranks = list(ranks)
        self._merge = merge
        self._count = 0

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self._count += 1
        update_id = f"update-{version}-{self._count}-{id(self):x}"
        manifests = [await rank.ask("begin", version, update_id) for rank in self.ranks]
        return update_id, manifests[0]

    async def buckets(self, update_id: str) -> AsyncIterator[Any]:
        while True:
            parts = await asyncio.gather(*[rank.ask("next") for rank in self.ranks])
            if parts[0] is None:
                return
            yield self._merge(parts) if self._merge is not None else parts[0]

    async def acknowledge(self, update_id: str, index: int) -> None:
        await asyncio.gather(*[rank.ask("acknowledge", update_id, index) for rank in self.ranks])

    async def release(self, update_id: str) -> None:
        await asyncio.gather(*[rank.ask("release", update_id) for rank in self.ranks])
