"""Local transport to engines that open memory by handle, beside those that open files.

    engines that open files        ShmBucket, as the local transport's
    engines that take handles      HandleBucket: host memory is a segment, and the same bucket for those with files;
                                   device memory where every engine is on such a device: tensors that lie in one
                                   block, or alone in their bucket, where they are, others packed into a new one

The sender keeps a bucket's memory until it is acknowledged. A receiver has copied by then: on a device its side waits
for the copies when it lets go of the memory, and memory that somebody has not let go of yet is not used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import msgspec
import torch

from miles_contracts import DTYPE_BYTES, ShmBucket, WeightManifest
from miles_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, Piece, plan_buckets
from miles_sync.export import CheckedExport
from miles_sync.filling import fill_bucket
from miles_sync.handles import alias, pack
from miles_sync.local import SHARED_MEMORY, LocalSender
from miles_sync.messages import HandleBucket, handle_device
from miles_sync.named_memory import HEADER_BYTES, NamedMemory, require_named_memory


class HandingSender:
    """Sends through files and by handle.

    Args:
        directory: the shared-memory mount.
        bucket_bytes: capacity of a bucket.
    """

    def __init__(self, directory: Path = SHARED_MEMORY, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._files = LocalSender(directory, bucket_bytes, receivers_copy=True)
        self._device = DeviceBuckets(bucket_bytes)
        self._directory, self._bucket_bytes = directory, bucket_bytes
        self._receivers: tuple[str, ...] = ()
        self._devices: set[str | None] = set()
        self._named = NamedMemory()

    def set_receivers(self, receivers: Sequence[str], *, digests: bool = True) -> None:
        """From now on these receive: names of `handle_name`, and of any other form for engines that open files.

        Args:
            receivers: their names; none, where all open files.
            digests: whether any of them compares digests.

        Raises:
            InvalidFieldError: handles were asked for, and the shared-memory mount has none.
        """
        self._devices = {handle_device(name) for name in receivers}
        self._receivers = tuple(name for name in receivers if handle_device(name) is not None)
        if self._receivers:
            require_named_memory(self._directory)
        self._files.digests = digests

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, update_id: str
    ) -> Iterator[ShmBucket | HandleBucket]:
        """Fill bucket after bucket; each is complete when it is yielded and stays until it is acknowledged.

        No tensor is asked for before the first bucket is.

        Raises:
            WeightUpdateError: the tensors are not the manifest's, or there is no room.
        """
        if not self._receivers:
            yield from self._files.send(tensors, manifest, update_id)
            return
        source = iter(tensors)
        first = list(islice(source, 1))
        devices = {tensor.device.type for _, tensor in first}
        every = chain((first.pop() for _ in range(len(first))), source)  # nothing is held here until the end
        if self._devices == devices != {"cpu"}:
            yield from self._device.send(every, manifest, update_id, self._receivers)
        else:
            yield from self._send_named(every, manifest, update_id)

    def _send_named(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, update_id: str
    ) -> Iterator[HandleBucket]:
        plan = [_behind_header(b) for b in plan_buckets(manifest.tensors, self._bucket_bytes, split=False)]
        for bucket, segment in self._files.fill(CheckedExport(tensors, manifest), plan, update_id):
            memory = self._named.over(segment)[: bucket.num_bytes - HEADER_BYTES]
            yield HandleBucket(
                update_id=update_id,
                index=bucket.index,
                num_bytes=bucket.num_bytes,
                handles={name: pack(memory, bucket.tensors, HEADER_BYTES) for name in self._receivers},
                file=bucket,
                last=bucket.index == len(plan) - 1,
            )

    def acknowledge(self, update_id: str, index: int) -> None:
        """Every receiver has copied this bucket."""
        self._files.acknowledge(update_id, index)
        self._device.acknowledge(update_id, index)

    def release(self, update_id: str) -> None:
        """The update is over, committed or not."""
        self._files.release(update_id)
        self._device.release(update_id)

    def close(self) -> None:
        """Free everything."""
        self._named.close()
        self._device.close()
        self._files.close()


class DeviceBuckets:
    """Buckets in the memory of the device that the tensors are on, packed only where they are not in one block.

    An engine that dies with a handle leaves its bucket counted as open: the memory is free again when this process
    ends.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._held: dict[str, dict[int, torch.Tensor]] = {}

    def send(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        manifest: WeightManifest,
        update_id: str,
        receivers: Sequence[str],
    ) -> Iterator[HandleBucket]:
        """As `HandingSender.send`, without digests: nothing here passes the host."""
        export = CheckedExport(tensors, manifest)
        plan = plan_buckets(manifest.tensors, self._bucket_bytes, split=False)
        held = self._held.setdefault(update_id, {})
        for bucket in plan:
            room = Room(bucket)
            placed, _, _ = fill_bucket(bucket, export, room.put, digests=False)
            memory, offsets = room.finish()
            held[bucket.index] = memory
            placed = tuple(msgspec.structs.replace(p, offset=offsets[p.spec.name]) for p in placed)
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)  # whoever opens it may read at once
            yield HandleBucket(
                update_id=update_id,
                index=bucket.index,
                num_bytes=bucket.num_bytes,
                handles={name: pack(memory, placed) for name in receivers},
                last=bucket is plan[-1],
            )
        export.finish()

    def acknowledge(self, update_id: str, index: int) -> None:
        """Every receiver has copied this bucket."""
        self._held.get(update_id, {}).pop(index, None)

    def release(self, update_id: str) -> None:
        """The update is over."""
        held = self._held.pop(update_id, None)
        if held is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Free everything."""
        self._held.clear()


class Room:
    """Takes the tensors of one bucket: where they are as long as they are of one block, else copies of them."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lying: list[tuple[Piece, torch.Tensor]] = []
        self._packed: torch.Tensor | None = None

    def put(self, piece: Piece, data: torch.Tensor) -> None:
        """Take a tensor's bytes in; packing begins with the first one that lies elsewhere."""
        if self._packed is None and self._lies_with_others(piece, data):
            self._lying.append((piece, data))
            return
        if self._packed is None:
            self._packed = torch.empty(self._bucket.num_bytes, dtype=torch.uint8, device=data.device)
            for earlier, found in self._lying:
                self._copy(earlier, found, self._packed)
            self._lying.clear()
        self._copy(piece, data, self._packed)

    def finish(self) -> tuple[torch.Tensor, dict[str, int]]:
        """The bucket's memory, and each tensor's first byte in it by name."""
        if self._packed is not None:
            return self._packed, {piece.spec.name: piece.offset for piece in self._bucket.pieces}
        starts = {piece.spec.name: int(data.storage_offset()) for piece, data in self._lying if len(data)}
        empty = {piece.spec.name: 0 for piece, data in self._lying if not len(data)}
        if not starts:
            return torch.empty(0, dtype=torch.uint8), empty
        storage = next(data for _, data in self._lying if len(data)).untyped_storage()
        first, end = min(starts.values()), max(starts[p.spec.name] + len(d) for p, d in self._lying if len(d))
        begin = first - first % max(DTYPE_BYTES.values())  # where also an empty tensor of any dtype can begin
        return alias(storage, begin, end), {n: start - begin for n, start in starts.items()} | empty

    def _lies_with_others(self, piece: Piece, data: torch.Tensor) -> bool:
        if not len(data):
            return True
        if data.storage_offset() % DTYPE_BYTES[piece.spec.dtype]:
            return False
        block = data.untyped_storage().data_ptr()
        return all(block == other.untyped_storage().data_ptr() for _, other in self._lying if len(other))

    @staticmethod
    def _copy(piece: Piece, data: torch.Tensor, target: torch.Tensor) -> None:
        target[piece.offset :][: piece.num_bytes].copy_(data)


def _behind_header(bucket: Bucket) -> Bucket:
    pieces = [msgspec.structs.replace(piece, offset=piece.offset + HEADER_BYTES) for piece in bucket.pieces]
    return msgspec.structs.replace(bucket, pieces=tuple(pieces))
