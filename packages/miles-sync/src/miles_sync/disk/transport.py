"""Disk-delta as a transport of the update transaction: publishing is sending, pulling is preparing.

The pull is everything that takes time, and it does not touch what is served: a host that pulls when it sees a new
publication (`DeltaSubscriber.pull`) has nothing left to do when the transaction asks for it, so generation pauses only
for the engine's reload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from miles_contracts import (
    Engine,
    GenerateResult,
    PauseMode,
    SamplingParams,
    WeightManifest,
    WeightUpdateError,
)
from miles_sync.disk.publisher import DeltaPublisher
from miles_sync.disk.subscriber import DeltaSubscriber, PullReport
from miles_sync.messages import DiskBucket
from miles_sync.tensors import from_bytes


class DiskSender:
    """Publishes each update and announces it."""

    def __init__(self, publisher: DeltaPublisher) -> None:
        self._publisher = publisher

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, update_id: str
    ) -> Iterator[DiskBucket]:
        """One announcement, after the publication is durable.

        Raises:
            WeightUpdateError: see `DeltaPublisher.publish`.
        """
        report = self._publisher.publish(tensors, manifest)
        yield DiskBucket(update_id=update_id, index=0, publication=report.id)

    def acknowledge(self, update_id: str, index: int) -> None:
        """Publications stay for hosts that are late; the publisher collects old ones."""

    def release(self, update_id: str) -> None:
        """As `acknowledge`."""


def pull_for(subscriber: DeltaSubscriber, bucket: DiskBucket, manifest: WeightManifest) -> PullReport:
    """Pull an announced publication and hold it against the update's manifest.

    Raises:
        WeightUpdateError: see `DeltaSubscriber.pull`; or it is another model or version than was announced.
    """
    report = subscriber.pull(bucket.publication)
    current = subscriber.current()
    assert current is not None
    lines = manifest.differences(current.state.manifest)
    if lines:
        raise WeightUpdateError(f"publication {bucket.publication} is not what was announced: {lines[0]}")
    return report


class DiskReceiver:
    """Serves tensors out of the local checkpoint, for engines that live in this process."""

    def __init__(self, subscriber: DeltaSubscriber) -> None:
        self.version: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._subscriber = subscriber
        self._open: tuple[str, WeightManifest] | None = None
        self._ready = False
        self._over: set[str] = set()

    def begin(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update.

        Raises:
            WeightUpdateError: it is over here.
        """
        if update_id in self._over:
            raise WeightUpdateError(f"update {update_id} is over here")
        if self._open is None or self._open[0] != update_id:
            self._open, self._ready = (update_id, manifest), False

    def load(self, bucket: DiskBucket) -> None:
        """Pull and verify. May be repeated."""
        _, manifest = self._require(bucket.update_id)
        pull_for(self._subscriber, bucket, manifest)
        self._ready = True

    def commit(self, update_id: str) -> None:
        """Load the pulled checkpoint.

        Raises:
            WeightUpdateError: nothing was pulled for this update.
        """
        if update_id in self._over and self._open is None:
            return
        _, manifest = self._require(update_id)
        current = self._subscriber.current()
        if not self._ready or current is None:
            raise WeightUpdateError("the publication was not pulled")
        self.tensors = {n: from_bytes(current.view(n).copy(), spec) for n, spec in current.specs.items()}
        self.version, self._open = manifest.version, None
        self._over.add(update_id)

    def rollback(self, update_id: str) -> None:
        """Drop an uncommitted update for good; the pulled checkpoint stays as a base for the next one."""
        if self._open is not None and self._open[0] == update_id:
            self._open = None
        self._over.add(update_id)

    def _require(self, update_id: str) -> tuple[str, WeightManifest]:
        if self._open is None or self._open[0] != update_id:
            raise WeightUpdateError(f"update {update_id} was not begun here")
        return self._open


class DiskEngine:
    """An engine that reloads from disk (`load_from_disk`), as an engine of the transaction.

    Unlike most, it can go back after a commit: the checkpoint before is still on the host's disk.

    Args:
        engine: any engine.
        subscriber: of the engine's host; engines of one host share its folder.
    """

    def __init__(self, engine: Engine, subscriber: DeltaSubscriber) -> None:
        self._engine, self._subscriber = engine, subscriber
        self._open: tuple[str, WeightManifest] | None = None
        self._pulled: PullReport | None = None
        self._served: PullReport | None = None
        self._before: tuple[str, PullReport | None] | None = None

    @property
    def url(self) -> str:
        """The engine's."""
        return self._engine.url

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Note what is coming."""
        if self._open is None or self._open[0] != update_id:
            self._open, self._pulled = (update_id, manifest), None

    async def load_bucket(self, bucket: DiskBucket) -> None:
        """Pull the publication on this host.

        Raises:
            WeightUpdateError: names file and tensor.
        """
        manifest = self._require(bucket.update_id)
        self._pulled = await asyncio.to_thread(pull_for, self._subscriber, bucket, manifest)

    async def commit_weight_update(self, update_id: str) -> None:
        """Let the engine load it. Committing the same update again changes nothing."""
        if self._before is not None and self._before[0] == update_id:
            return
        manifest = self._require(update_id)
        if self._pulled is None:
            raise WeightUpdateError("the publication was not pulled", engine=self.url)
        await self._engine.load_from_disk(self._pulled.path, manifest.version)
        self._before, self._served = (update_id, self._served), self._pulled
        self._open = None

    async def rollback_weight_update(self, update_id: str) -> None:
        """Drop the update; after a commit, let the engine load the version before, if this host had one."""
        if self._open is not None and self._open[0] == update_id:
            self._open = None
        if self._before is None or self._before[0] != update_id:
            return
        before = self._before[1]
        if before is None:
            raise WeightUpdateError("there is no version before to go back to", engine=self.url)
        await self._engine.load_from_disk(before.path, before.version)
        self._before, self._served = None, before

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None, routing: bool = False
    ) -> GenerateResult:
        """The engine's."""
        return await self._engine.generate(input_ids, params, request_id=request_id, routing=routing)

    async def abort(self, request_id: str | None = None) -> None:
        """The engine's."""
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """The engine's."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """The engine's."""
        await self._engine.resume()

    async def flush_cache(self) -> None:
        """The engine's."""
        await self._engine.flush_cache()

    async def weight_version(self) -> int | None:
        """The engine's."""
        return await self._engine.weight_version()

    async def healthy(self) -> bool:
        """The engine's."""
        return await self._engine.healthy()

    async def load_from_disk(self, path: Path, version: int) -> None:
        """The engine's."""
        await self._engine.load_from_disk(path, version)

    def _require(self, update_id: str) -> WeightManifest:
        if self._open is None or self._open[0] != update_id:
            raise WeightUpdateError(f"update {update_id} was not begun here", engine=self.url)
        return self._open[1]
