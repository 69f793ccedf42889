"""Local transport: weights pass through files in shared memory; only names, offsets and digests are sent.

    sender                        messages                       receiver
    copy + digest into a segment --- ShmBucket ---------------->  map, verify, copy
    next bucket into another     <-- acknowledge(index) --------  done with the segment

Nothing is pickled. With the driver's two buckets in flight the sender holds two segments, whatever the model's size.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from miles_contracts import ShmBucket, ShmTensor, WeightManifest, WeightUpdateError
from miles_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, Piece, plan_buckets
from miles_sync.export import CheckedExport
from miles_sync.filling import Deliver, fill_bucket
from miles_sync.segments import Segment, SegmentPool
from miles_sync.staging import Receiver
from miles_sync.tensors import Bytes, fetch_with_digest
from miles_sync.verify import Comparison, Difference, Tolerance

SHARED_MEMORY = Path("/dev/shm")


class LocalSender:
    """Writes buckets into shared memory.

    Args:
        directory: the shared-memory mount.
        bucket_bytes: capacity of a bucket.
        digests: whether specs carry digests; without them receivers can verify the manifest only. May be changed
            between updates.
        receivers_copy: True when every receiver copies a bucket before it is acknowledged, so that an acknowledged
            segment is written again at once. Otherwise it is unlinked, which a receiver that still maps it survives,
            and segments are used again only after `release`.
    """

    def __init__(
        self,
        directory: Path = SHARED_MEMORY,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        digests: bool = True,
        receivers_copy: bool = False,
    ) -> None:
        plan_buckets((), bucket_bytes)
        self.bucket_bytes = bucket_bytes
        self.digests = digests
        self._receivers_copy = receivers_copy
        self._pool = SegmentPool(directory)
        self._live: dict[str, dict[int, Segment]] = {}
        self._retired: dict[str, list[Segment]] = {}

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, update_id: str
    ) -> Iterator[ShmBucket]:
        """Write the update bucket by bucket; each yielded bucket is complete and stays until it is acknowledged.

        A part of a split tensor carries its own digest in its spec and the whole tensor's in `part_of`; both specs
        have the tensor's name.

        Args:
            tensors: name and tensor (any device) in the manifest's order.
            manifest: metadata of the update; digests in it are not looked at.
            update_id: the transaction.

        Raises:
            WeightUpdateError: the tensors are not those of the manifest (names the first one), or the mount is full.
        """
        plan = plan_buckets(manifest.tensors, self.bucket_bytes)
        for bucket, _ in self.fill(CheckedExport(tensors, manifest), plan, update_id):
            yield bucket

    def fill(
        self, export: CheckedExport, plan: Sequence[Bucket], update_id: str
    ) -> Iterator[tuple[ShmBucket, Segment]]:
        """As `send`, by a plan of the caller's; each bucket with the segment that it is in."""
        live = self._live.setdefault(update_id, {})
        for bucket in plan:
            self._make_room(update_id)
            segment = self._pool.take(bucket.num_bytes)
            live[bucket.index] = segment
            placed, part_of, part_start = fill_bucket(bucket, export, self._writer(segment), digests=self.digests)
            yield (
                ShmBucket(
                    path=str(segment.path),
                    num_bytes=bucket.num_bytes,
                    tensors=placed,
                    update_id=update_id,
                    index=bucket.index,
                    part_of=part_of,
                    part_start=part_start,
                ),
                segment,
            )
        export.finish()

    def _writer(self, segment: Segment) -> Deliver:
        def write(piece: Piece, data: torch.Tensor) -> str | None:
            target = segment.array[piece.offset : piece.offset + piece.num_bytes]
            return fetch_with_digest(data, target, digests=self.digests)

        return write

    def acknowledge(self, update_id: str, index: int) -> None:
        """Every receiver has this bucket: its segment may go. Unknown buckets are ignored (a repeated call)."""
        segment = self._live.get(update_id, {}).pop(index, None)
        if segment is None:
            return
        if self._receivers_copy:
            self._pool.give_back(segment, reuse=True)
        else:
            self._retired.setdefault(update_id, []).append(segment)

    def _make_room(self, update_id: str) -> None:
        """Unlink acknowledged segments beyond two; up to two stay for the next update, which saves their allocation."""
        retired = self._retired.get(update_id, [])
        while retired and len(retired) + len(self._live[update_id]) >= 2:
            self._pool.give_back(retired.pop(0), reuse=False)

    def release(self, update_id: str) -> None:
        """The update is over, committed or not: all its segments may be used again."""
        for segment in [*self._live.pop(update_id, {}).values(), *self._retired.pop(update_id, [])]:
            self._pool.give_back(segment, reuse=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory held now."""
        return self._pool.num_bytes

    def close(self) -> None:
        """Remove all segments."""
        self._live.clear()
        self._retired.clear()
        self._pool.close()

    def __enter__(self) -> LocalSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MappedBucket:
    """A bucket of the other side, mapped read-only. Use as a context manager; its views end with it."""

    def __init__(self, bucket: ShmBucket) -> None:
        self._bucket = bucket
        try:
            descriptor = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WeightUpdateError(f"cannot open bucket {bucket.index} at {bucket.path}: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size < bucket.num_bytes:
                raise WeightUpdateError(
                    f"bucket {bucket.index} says {bucket.num_bytes} bytes, {bucket.path} has {size}"
                )
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else None
        finally:
            os.close(descriptor)
        self._data: Bytes = np.frombuffer(self._map, np.uint8) if self._map is not None else np.empty(0, np.uint8)

    def bytes_of(self, tensor: ShmTensor) -> Bytes:
        """Read-only uint8 view of one tensor.

        Raises:
            WeightUpdateError: the tensor lies outside the bucket.
        """
        end = tensor.offset + tensor.spec.num_bytes
        if tensor.offset < 0 or end > self._bucket.num_bytes:
            raise WeightUpdateError(f"lies outside bucket {self._bucket.index}", tensor=tensor.spec.name)
        return self._data[tensor.offset : end]

    def __enter__(self) -> MappedBucket:
        return self

    def __exit__(self, *_: object) -> None:
        self._data = np.empty(0, np.uint8)
        # Leaving the mapping to the garbage collector keeps it valid for a view that somebody still holds.
        self._map = None


class LocalReceiver(Receiver):
    """Copies buckets of this host's shared memory into memory of its own, in any order, each as often as it comes."""

    def load(self, bucket: ShmBucket) -> None:
        """Verify and copy one bucket.

        Raises:
            WeightUpdateError: names the tensor and what is wrong with it.
        """
        staging = self.staging(bucket.update_id)
        with MappedBucket(bucket) as mapped:
            for tensor in bucket.tensors:
                staging.put(tensor.spec, mapped.bytes_of(tensor), bucket.part_of, bucket.part_start)

    def compare(self, buckets: Iterable[ShmBucket], tolerance: Tolerance | None = None) -> list[Difference]:
        """Hold the served weights against an update that is sent again: by bits, or by value within a tolerance.

        Returns:
            What differs; nothing is changed.
        """
        comparison = Comparison(self.tensors, tolerance)
        for bucket in buckets:
            with MappedBucket(bucket) as mapped:
                for tensor in bucket.tensors:
                    comparison.put(tensor.spec, mapped.bytes_of(tensor), bucket.part_of, bucket.part_start)
        return comparison.finish()
