"""Disk-delta as a transport of the update transaction: publishing is sending, pulling is preparing.

The pull is everything that takes time, and it does not touch what is served: a host that pulls when it sees a new
publication (`DeltaSubscriber.pull`) has nothing left to do when the transaction asks for it, so generation pauses only
for the engine's reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from miles_contracts import WeightManifest, WeightUpdateError
from miles_sync.disk.engine import pull_for
from miles_sync.disk.publisher import DeltaPublisher
from miles_sync.disk.subscriber import DeltaSubscriber
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
