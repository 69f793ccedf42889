"""Broadcast transport: one sender, all engine ranks, each byte once per engine rank.

    sender    fill 0 | fill 1 | fill 2 |           two buffers; filling (copy, digest, and the gather behind the
    wire             | send 0 | send 1 | send 2    export) overlaps the collective, which runs on its own thread
    receiver         | recv 0 | recv 1 | recv 2
    verify                    | put 0  | put 1     verifying a bucket overlaps receiving the next

Metadata goes through the control plane, so a receiver enters a collective only after it has been told what comes and
in which group; a receiver that is gone makes the control plane fail, not the collective hang unseen.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import torch

from miles_contracts import InvalidFieldError, ShmTensor, TensorSpec, WeightManifest, WeightUpdateError
from miles_sync.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from miles_sync.export import CheckedExport
from miles_sync.filling import fill_bucket
from miles_sync.group import Group, Lane, Meeting
from miles_sync.staging import Receiver
from miles_sync.tensors import Bytes

SENDER_RANK = 0


class BroadcastBucket(msgspec.Struct, frozen=True, kw_only=True, tag="broadcast_bucket"):
    """What the next collective brings.

    Attributes:
        group: name of the group; a receiver joins it when it is new.
        host, port: the meeting point of the group.
        receivers: names of the receivers; the i-th has rank i + 1.
        num_bytes: length of the collective's buffer.
        tensors: what lies where in it.
        update_id, index, part_of, part_start: as in `ShmBucket`.
    """

    group: str
    host: str
    port: int
    receivers: tuple[str, ...]
    num_bytes: int
    tensors: tuple[ShmTensor, ...]
    update_id: str
    index: int
    part_of: TensorSpec | None = None
    part_start: int = 0


class BroadcastSender:
    """Rank 0 of the group.

    Args:
        meeting: served by this process.
        receivers: names of all engine ranks.
        bucket_bytes: capacity of a bucket.
        backend: `gloo`, or `nccl` with buffers on `device`.
        device: where the collective's buffers live.
        digests: whether specs carry digests.
    """

    def __init__(
        self,
        meeting: Meeting,
        receivers: Sequence[str],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        digests: bool = True,
    ) -> None:
        plan_buckets((), bucket_bytes)
        self._meeting, self._backend, self._device = meeting, backend, device
        self._bucket_bytes, self._digests = bucket_bytes, digests
        self._receivers: tuple[str, ...] = ()
        self._group: Future[Group] | None = None
        self._group_name = ""
        self._lane = Lane("broadcast")
        self._buffers: list[Bytes] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._sending: list[Future[None] | None] = [None, None]
        self.set_receivers(receivers)

    def set_receivers(self, receivers: Sequence[str]) -> None:
        """To be called when an engine has joined, left or been restarted: the next update opens a new group.

        Raises:
            InvalidFieldError: no receivers, or one twice.
        """
        if not receivers or len(set(receivers)) != len(receivers):
            raise InvalidFieldError("receivers", list(receivers), "name at least one, each once")
        self._receivers = tuple(receivers)
        self._abandon()

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, update_id: str
    ) -> Iterator[BroadcastBucket]:
        """Start the collective of each bucket and yield its description, to be forwarded at once.

        Raises:
            WeightUpdateError: the tensors are not the manifest's, or a collective failed.
        """
        export = CheckedExport(tensors, manifest)
        for bucket in plan_buckets(manifest.tensors, self._bucket_bytes):
            slot = bucket.index % 2
            self._finish(slot)
            if len(self._buffers[slot]) < bucket.num_bytes:
                self._buffers[slot] = np.empty(bucket.num_bytes, np.uint8)
            memory = self._buffers[slot][: bucket.num_bytes]
            placed, part_of, part_start = fill_bucket(bucket, memory, export, digests=self._digests)
            self._start(slot, memory)
            yield BroadcastBucket(
                group=self._group_name,
                host=self._meeting.host,
                port=self._meeting.port,
                receivers=self._receivers,
                num_bytes=bucket.num_bytes,
                tensors=placed,
                update_id=update_id,
                index=bucket.index,
                part_of=part_of,
                part_start=part_start,
            )
        export.finish()
        self._finish(0)
        self._finish(1)

    def acknowledge(self, update_id: str, index: int) -> None:
        """Buffers are guarded by their collectives: nothing to do."""

    def release(self, update_id: str) -> None:
        """The update is over; a group that still waits for somebody is given up."""
        if any(future is not None and not future.done() for future in self._sending):
            self._abandon()

    def close(self) -> None:
        """Give the group up and end the thread."""
        self._abandon()
        self._lane.close()

    def _start(self, slot: int, memory: Bytes) -> None:
        if self._group is None:
            self._group_name = f"weights-{secrets.token_hex(6)}"
            name, size = self._group_name, len(self._receivers) + 1
            self._group = self._lane.submit(lambda: self._meeting.open(name, SENDER_RANK, size, self._backend))
        group = self._group

        def collective() -> None:
            tensor = torch.from_numpy(memory)
            group.result(0).broadcast(tensor if self._device == "cpu" else tensor.to(self._device), SENDER_RANK)

        self._sending[slot] = self._lane.submit(collective)

    def _finish(self, slot: int) -> None:
        future = self._sending[slot]
        if future is None:
            return
        try:
            future.result()
        except Exception as error:
            raise WeightUpdateError(f"the broadcast of a bucket failed: {error}") from error
        self._sending[slot] = None

    def _abandon(self) -> None:
        """Leave the group to its fate, and buffers that a hanging collective may still read with it."""
        group, self._group = self._group, None
        if group is not None:
            self._lane.close()
            self._lane = Lane("broadcast")
            if group.done() and group.exception() is None:
                group.result().close()
        self._sending = [None, None]
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]


class BroadcastReceiver(Receiver):
    """One engine rank.

    Args:
        name: the name that the sender knows it by.
        timeout_s: for the meeting and each collective.
        backend, device: as the sender's.
    """

    def __init__(self, name: str, *, timeout_s: float = 60.0, backend: str = "gloo", device: str = "cpu") -> None:
        super().__init__()
        self._name, self._timeout_s = name, timeout_s
        self._backend, self._device = backend, device
        self._group: Group | None = None
        self._group_name = ""
        self._meeting: Meeting | None = None
        self._buffers: list[Bytes] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._verifying: Future[Any] | None = None
        self._verifier = Lane("verify")
        self._last: tuple[str, int] | None = None

    def load(self, bucket: BroadcastBucket) -> None:
        """Take part in one collective; the bucket before is verified meanwhile, the last one before this returns.

        A repeated bucket is not received again: its collective is over.

        Raises:
            WeightUpdateError: names what is wrong with this bucket or the one before.
        """
        staging = self.staging(bucket.update_id)
        if self._last == (bucket.update_id, bucket.index):
            return
        group = self._join(bucket)
        slot = bucket.index % 2
        if len(self._buffers[slot]) < bucket.num_bytes:
            self._buffers[slot] = np.empty(bucket.num_bytes, np.uint8)
        memory = self._buffers[slot][: bucket.num_bytes]
        tensor = torch.from_numpy(memory)
        try:
            if self._device == "cpu":
                group.broadcast(tensor, SENDER_RANK)
            else:
                on_device = torch.empty_like(tensor, device=self._device)
                group.broadcast(on_device, SENDER_RANK)
                tensor.copy_(on_device)
        except RuntimeError as error:
            self._leave()
            raise WeightUpdateError(f"bucket {bucket.index} did not arrive: {error}") from error
        self._last = (bucket.update_id, bucket.index)
        self._settle()

        def verify() -> None:
            for placed in bucket.tensors:
                data = memory[placed.offset : placed.offset + placed.spec.num_bytes]
                staging.put(placed.spec, data, bucket.part_of, bucket.part_start)

        self._verifying = self._verifier.submit(verify)
        if bucket.tensors[-1].spec.name == staging.manifest.tensors[-1].name:
            self._settle()

    def commit(self, update_id: str) -> None:
        self._settle()
        super().commit(update_id)

    def rollback(self, update_id: str) -> None:
        self._verifying = None
        super().rollback(update_id)

    def close(self) -> None:
        """Leave the group and end the thread."""
        self._leave()
        self._verifier.close()

    def _settle(self) -> None:
        future, self._verifying = self._verifying, None
        if future is not None:
            future.result()

    def _join(self, bucket: BroadcastBucket) -> Group:
        if self._group is not None and self._group_name == bucket.group:
            return self._group
        self._leave()
        if self._name not in bucket.receivers:
            raise WeightUpdateError(f"{self._name} is not in group {bucket.group}: {', '.join(bucket.receivers)}")
        meeting = self._meeting
        if meeting is None or (meeting.host, meeting.port) != (bucket.host, bucket.port):
            meeting = Meeting(bucket.host, bucket.port, owner=False, timeout_s=self._timeout_s)
        self._meeting = meeting
        rank = bucket.receivers.index(self._name) + 1
        self._group = meeting.open(bucket.group, rank, len(bucket.receivers) + 1, self._backend)
        self._group_name = bucket.group
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group, self._group_name = None, ""
