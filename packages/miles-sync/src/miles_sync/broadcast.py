"""Broadcast transport: one sender, all engine ranks, each byte once per engine rank.

    sender    fill 0 | fill 1 | fill 2 |           two buffers; filling (copy, digest, and the gather behind the
    wire             | send 0 | send 1 | send 2    export) overlaps the collective, which runs on its own thread
    receiver         | recv 0 | recv 1 | recv 2
    verify                    | put 0  | put 1     verifying a bucket overlaps receiving the next

Metadata goes through the control plane, so a receiver enters a collective only after it has been told what comes and
in which group; a receiver that is gone makes the control plane fail, not the collective hang unseen. Groups and
buffers are those of SGLang's `/init_weights_update_group` and `flattened_bucket`, so that its servers can be receivers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from miles_contracts import InvalidFieldError, WeightManifest, WeightUpdateError
from miles_sync.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from miles_sync.export import CheckedExport
from miles_sync.filling import fill_bucket
from miles_sync.group import Group, Lane, Meeting
from miles_sync.messages import BroadcastBucket, GroupOffer
from miles_sync.staging import Receiver
from miles_sync.tensors import Bytes

SENDER_RANK = 0


class BroadcastSender:
    """Rank 0 of the group.

    Args:
        meeting: served by this process.
        receivers: names of all engine ranks; none yet, when `set_receivers` will be called.
        bucket_bytes: capacity of a bucket.
        backend: `gloo`, or `nccl` with buffers on `device`.
        device: where the collective's buffers live.
        digests: whether specs carry digests.
        split: False keeps a tensor larger than a bucket whole, which SGLang needs; may be changed between updates.
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
        split: bool = True,
    ) -> None:
        plan_buckets((), bucket_bytes)
        self._meeting, self._backend, self._device = meeting, backend, device
        self._bucket_bytes, self._digests = bucket_bytes, digests
        self.split = split
        self._receivers: tuple[str, ...] = ()
        self._group: Future[Group] | None = None
        self._group_name = ""
        self._lane = Lane("broadcast")
        self._buffers: list[Bytes] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._sending: list[Future[None] | None] = [None, None]
        if receivers:
            self.set_receivers(receivers)

    def set_receivers(self, receivers: Sequence[str]) -> GroupOffer:
        """To be called when an engine has joined, left or been restarted: opens a new group and waits in it.

        Returns:
            The group; this returns before anybody has joined it.

        Raises:
            InvalidFieldError: no receivers, or one twice.
        """
        if not receivers or len(set(receivers)) != len(receivers):
            raise InvalidFieldError("receivers", list(receivers), "name at least one, each once")
        self._receivers = tuple(receivers)
        self._abandon()
        return self._open()

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, update_id: str
    ) -> Iterator[BroadcastBucket]:
        """Start the collective of each bucket and yield its description, to be forwarded at once.

        Raises:
            WeightUpdateError: the tensors are not the manifest's, or a collective failed.
        """
        if not self._receivers:
            raise WeightUpdateError("no receiver has been named yet")
        export = CheckedExport(tensors, manifest)
        plan = plan_buckets(manifest.tensors, self._bucket_bytes, packed=True, split=self.split)
        for bucket in plan:
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
                last=bucket is plan[-1],
            )
        export.finish()
        self._finish(0)
        self._finish(1)

    def acknowledge(self, update_id: str, index: int) -> None:
        """Buffers are guarded by their collectives: nothing to do."""

    def release(self, update_id: str) -> None:
        """The update is over; a group that still waits for somebody, or that somebody has left, is given up."""
        started = [future for future in self._sending if future is not None]
        if any(not future.done() or future.exception() is not None for future in started):
            self._abandon()

    def close(self) -> None:
        """Give the group up and end the thread."""
        self._abandon()
        self._lane.close()

    def _open(self) -> GroupOffer:
        name, size = f"weights-{secrets.token_hex(6)}", len(self._receivers) + 1
        self._group_name = name
        self._group = self._lane.submit(lambda: self._meeting.open(name, SENDER_RANK, size, self._backend))
        return GroupOffer(
            group=name,
            host=self._meeting.host,
            port=self._meeting.port,
            size=size,
            backend=self._backend,
            timeout_s=self._meeting.timeout_s,
        )

    def _start(self, slot: int, memory: Bytes) -> None:
        if self._group is None:
            self._open()
        opened = self._group
        assert opened is not None

        def collective() -> None:
            group, tensor = opened.result(0), torch.from_numpy(memory)
            try:
                group.broadcast(tensor if self._device == "cpu" else tensor.to(self._device), SENDER_RANK)
            except RuntimeError:
                # Somebody is gone. The others must not wait for what will not come.
                group.close()
                raise

        self._sending[slot] = self._lane.submit(collective)

    def _finish(self, slot: int) -> None:
        future = self._sending[slot]
        if future is None:
            return
        try:
            future.result()
        except Exception as error:  # what the sending thread raised, handed on with a name
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
        # Tensors that came whole stay where they came: what is received here is what will serve.
        memory: Bytes = np.empty(bucket.num_bytes, np.uint8)
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
                if bucket.part_of is None:
                    staging.adopt(placed.spec, data)
                else:
                    staging.put(placed.spec, data, bucket.part_of, bucket.part_start)

        self._verifying = self._verifier.submit(verify)
        if bucket.last:
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
