"""The target side of peer-to-peer: memory that others write, digests that decide what counts."""

from __future__ import annotations

import torch

from miles_contracts import WeightManifest, WeightUpdateError, digest
from miles_contracts.recycling import Recycler
from miles_sync.layout import Layout
from miles_sync.messages import PeerBucket
from miles_sync.peer.memory import Arena, PeerBackend
from miles_sync.peer.sender import box_bytes
from miles_sync.tensors import from_bytes
from miles_sync.transfer import plan_transfers


class PeerReceiver:
    """One target rank. Its `tensors` are the stored ones of its layout, never the canonical ones.

    The region that peers write is not what is served: a commit copies it, so a late write of a dead trainer cannot
    reach weights that serve; it fails a later update's digests at worst.

    Args:
        source, target: layouts of both sides.
        rank: ours in the target layout.
        backend: exposes the region.
    """

    def __init__(self, source: Layout, target: Layout, rank: int, backend: PeerBackend) -> None:
        self.version: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._arena = Arena(target.ranks[rank])
        self._memory = backend.expose(self._arena.num_bytes)
        self._copies = Recycler()
        # Padding is never written: it must not differ from run to run.
        self._memory.data[:] = 0
        transfers = plan_transfers(source, target).transfers
        self._mine = {number: t for number, t in enumerate(transfers) if t.target == rank}
        self._total = len(transfers)
        self._specs = {spec.name: spec for spec in target.tensors}
        self._open: tuple[str, WeightManifest] | None = None
        self._verified: set[int] = set()
        self._committed: str | None = None
        self._closed: str | None = None

    @property
    def handle(self) -> str:
        """The region, for the senders."""
        return self._memory.handle

    def begin(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update; what was verified of another one no longer counts.

        Raises:
            WeightUpdateError: the manifest is not of this model, or the update is over.
        """
        if update_id in (self._closed, self._committed):
            raise WeightUpdateError(f"update {update_id} is over here")
        if {s.name: (s.dtype, s.shape) for s in manifest.tensors} != {
            n: (s.dtype, s.shape) for n, s in self._specs.items()
        }:
            raise WeightUpdateError("the manifest is not of the model that the transfer plan was made for")
        if self._open is None or self._open[0] != update_id:
            self._open, self._verified = (update_id, manifest), set()

    def load(self, bucket: PeerBucket) -> None:
        """Verify what peers say they have written here. May be repeated.

        Raises:
            WeightUpdateError: a digest differs (names the tensor), or a transfer that the plan does not have.
        """
        self._require(bucket.update_id)
        for written in bucket.written:
            transfer = self._mine.get(written.transfer)
            if transfer is None:
                if not 0 <= written.transfer < self._total:
                    raise WeightUpdateError(f"transfer {written.transfer} is not in the plan of {self._total}")
                continue
            self._verified.discard(written.transfer)
            if written.digest is not None:
                got = digest(box_bytes(transfer, self._arena, self._memory.data).data)
                if got != written.digest:
                    reason = f"digest is {got}, source rank {transfer.source} says {written.digest}"
                    raise WeightUpdateError(reason, tensor=transfer.name)
            self._verified.add(written.transfer)

    def commit(self, update_id: str) -> None:
        """Serve a copy of the region. Committing the same update again changes nothing.

        Raises:
            WeightUpdateError: a transfer is missing; names its tensor.
        """
        if update_id == self._committed:
            return
        manifest = self._require(update_id)
        missing = sorted(self._mine.keys() - self._verified)
        if missing:
            transfer = self._mine[missing[0]]
            reason = f"{len(missing)} transfer(s) did not come, the first from source rank {transfer.source}"
            raise WeightUpdateError(reason, tensor=transfer.name)
        served = self._copies.take(len(self._memory.data))
        served[:] = self._memory.data
        self.tensors = {
            name: from_bytes(served[start : start + self._arena.specs[name].num_bytes], self._arena.specs[name])
            for name, start in self._arena.offsets.items()
        }
        self.version, self._committed, self._open = manifest.version, update_id, None

    def rollback(self, update_id: str) -> None:
        """Drop an uncommitted update for good."""
        self._closed = update_id
        if self._open is not None and self._open[0] == update_id:
            self._open = None

    def close(self) -> None:
        """Give the region up."""
        self._memory.close()

    def _require(self, update_id: str) -> WeightManifest:
        if self._open is None or self._open[0] != update_id:
            raise WeightUpdateError(f"update {update_id} was not begun here")
        return self._open[1]
