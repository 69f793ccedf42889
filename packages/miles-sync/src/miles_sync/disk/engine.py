"""An engine of the transaction that loads what its host has pulled. The driver's side: needs no torch."""

from __future__ import annotations

import asyncio
from typing import Any

from miles_contracts import Engine, WeightManifest, WeightUpdateError
from miles_contracts.engine_proxy import EngineProxy
from miles_sync.disk.subscriber import DeltaSubscriber, PullReport
from miles_sync.messages import DiskBucket


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


class DiskEngine(EngineProxy):
    """An engine that reloads from disk (`load_from_disk`), as an engine of the transaction.

    Unlike most, it can go back after a commit: the checkpoint before is still on the host's disk.

    Args:
        engine: any engine.
        subscriber: of the engine's host; engines of one host share its folder.
    """

    def __init__(self, engine: Engine, subscriber: DeltaSubscriber) -> None:
        super().__init__(engine)
        self._subscriber = subscriber
        self._open: tuple[str, WeightManifest] | None = None
        self._pulled: PullReport | None = None
        self._served: PullReport | None = None
        self._before: tuple[str, PullReport | None] | None = None

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Note what is coming."""
        if self._open is None or self._open[0] != update_id:
            self._open, self._pulled = (update_id, manifest), None

    async def load_bucket(self, bucket: Any) -> None:
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

    def _require(self, update_id: str) -> WeightManifest:
        if self._open is None or self._open[0] != update_id:
            raise WeightUpdateError(f"update {update_id} was not begun here", engine=self.url)
        return self._open[1]
