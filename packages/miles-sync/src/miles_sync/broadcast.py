"""Broadcast transport: one sender, all engine ranks, each byte once per engine rank.

    sender    take 0 | take 1 | take 2 |           two buckets; taking (digests, packing, and the gather behind the
    wire             | send 0 | send 1 | send 2    export) overlaps the collectives, which run on their own thread
    receiver         | recv 0 | recv 1 | recv 2
    verify                    | put 0  | put 1     verifying a transfer overlaps receiving the next

On one machine both ends are busy with copying through the kernel, so little else may touch the bytes: what can be is
sent from where it is, and all stays where it arrives, in memory that the version before the last one has left.

Metadata goes through the control plane, so a receiver enters a collective only after it has been told what comes and
in which group; a receiver that is gone makes the control plane fail, not the collective hang unseen. Groups and
buffers are those of SGLang's `/init_weights_update_group` and `flattened_bucket`, so that its servers can be receivers.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import torch

from miles_contracts import InvalidFieldError, ShmTensor, TensorSpec, WeightManifest, WeightUpdateError
from miles_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, Piece, plan_buckets
from miles_sync.export import CheckedExport
from miles_sync.filling import fill_bucket
from miles_sync.group import Group, Lane, Meeting
from miles_sync.messages import BroadcastBucket, GroupOffer
from miles_sync.outgoing import IN_PLACE_BYTES, Outgoing
from miles_sync.staging import Receiver, Staging
from miles_sync.tensors import Bytes, place_with_digest

SENDER_RANK = 0

_Taken = tuple[int, tuple[tuple[int, int], ...], tuple[tuple[ShmTensor, ...], TensorSpec | None, int]]
"""Bytes of a bucket; its transfers, none when it is one; as `fill_bucket`."""


class BroadcastSender:
    """Rank 0 of the group.

    Args:
        meeting: served by this process.
        receivers: names of all engine ranks; none yet, when `set_receivers` will be called.
        bucket_bytes: capacity of a bucket.
        backend: `gloo`, or `nccl` with buffers on `device`.
        device: where the collective's buffers live.
        digests: whether specs carry digests; may be changed between updates.
        split: False keeps a tensor larger than a bucket whole and packs every bucket, which SGLang needs; may be
            changed between updates.
        in_place_bytes: memory of at least this size is sent from where it is, unless buckets are packed.
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
        in_place_bytes: int = IN_PLACE_BYTES,
    ) -> None:
        plan_buckets((), bucket_bytes)
        if in_place_bytes < 1:
            raise InvalidFieldError("in_place_bytes", in_place_bytes, "use at least 1")
        self._meeting, self._backend, self._device = meeting, backend, device
        self._bucket_bytes, self.digests = bucket_bytes, digests
        self.split, self._in_place_bytes = split, in_place_bytes
        self._receivers: tuple[str, ...] = ()
        self._group: Future[Group] | None = None
        self._group_name = ""
        self._lane = Lane("broadcast")
        self._slots = (_Slot(), _Slot())
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
        """Start the collectives of each bucket and yield its description, to be forwarded at once.

        A tensor must not change before two more buckets have been asked for, or this has ended: it is sent from
        where it is. So what the export made anew for this is held that long, two buckets' worth and the tensor that
        is being split.

        Raises:
            WeightUpdateError: the tensors are not the manifest's, or a collective failed.
        """
        if not self._receivers:
            raise WeightUpdateError("no receiver has been named yet")
        export = CheckedExport(tensors, manifest)
        plan = plan_buckets(manifest.tensors, self._bucket_bytes, packed=not self.split, split=self.split)
        for planned in plan:
            slot = self._slots[planned.index % 2]
            self._finish(slot)
            take = self._take if self.split else self._take_packed
            try:
                num_bytes, transfers, (placed, part_of, part_start) = take(slot, planned, export)
            except BaseException:  # whatever ended this:
                # Nobody will be told to take part in what has been started.
                self._abandon()
                raise
            yield BroadcastBucket(
                group=self._group_name,
                host=self._meeting.host,
                port=self._meeting.port,
                receivers=self._receivers,
                num_bytes=num_bytes,
                tensors=placed,
                update_id=update_id,
                index=planned.index,
                transfers=transfers,
                part_of=part_of,
                part_start=part_start,
                last=planned is plan[-1],
            )
        export.finish()
        for slot in self._slots:
            self._finish(slot)

    def acknowledge(self, update_id: str, index: int) -> None:
        """Memory is guarded by its collectives: nothing to do."""

    def release(self, update_id: str) -> None:
        """The update is over; a group that still waits for somebody, or that somebody has left, is given up."""
        over = [slot.over for slot in self._slots if slot.over is not None]
        if any(not future.done() or future.exception() is not None for future in over):
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

    def _take(self, slot: _Slot, bucket: Bucket, export: CheckedExport) -> _Taken:
        """Start the collectives of a bucket."""
        outgoing = Outgoing(
            partial(self._start, slot),
            slot.room(bucket.num_bytes, self._device),
            digests=self.digests,
            in_place_bytes=self._in_place_bytes,
        )
        placed, part_of, part_start = fill_bucket(bucket, export, outgoing.put, digests=self.digests)
        outgoing.finish()
        self._started(slot)
        moved = tuple(msgspec.structs.replace(p, offset=at) for p, at in zip(placed, outgoing.offsets, strict=True))
        return outgoing.num_bytes, tuple(outgoing.transfers), (moved, part_of, part_start)

    def _take_packed(self, slot: _Slot, bucket: Bucket, export: CheckedExport) -> _Taken:
        """As `_take`, by one collective in which everything lies as it was planned."""
        memory = slot.room(bucket.num_bytes, self._device)

        def deliver(piece: Piece, data: torch.Tensor) -> str | None:
            return place_with_digest(data, memory[piece.offset :][: piece.num_bytes], digests=self.digests)

        described = fill_bucket(bucket, export, deliver, digests=self.digests)
        self._start(slot, memory)
        self._started(slot)
        return bucket.num_bytes, (), described

    def _started(self, slot: _Slot) -> None:
        slot.over = self._lane.submit(partial(_wait, self._group, tuple(slot.started)))

    def _start(self, slot: _Slot, data: torch.Tensor) -> None:
        if not len(data):
            return
        if self._group is None:
            self._open()
        opened = self._group
        assert opened is not None

        def collective() -> Callable[[], None]:
            group = opened.result(0)
            try:
                return group.broadcast(data.to(self._device), SENDER_RANK)
            except RuntimeError:
                # Somebody is gone. The others must not wait for what will not come.
                group.close()
                raise

        slot.started.append(self._lane.submit(collective))

    def _finish(self, slot: _Slot) -> None:
        if slot.over is None:
            return
        try:
            slot.over.result()
        except Exception as error:  # what the sending thread raised, handed on with a name
            raise WeightUpdateError(f"the broadcast of a bucket failed: {error}") from error
        slot.over = None
        slot.started.clear()

    def _abandon(self) -> None:
        """Leave the group to its fate, and with it the memory that a hanging collective may still read."""
        group, self._group = self._group, None
        if group is not None:
            self._lane.close()
            self._lane = Lane("broadcast")
            if group.done() and group.exception() is None:
                group.result().close()
        self._slots = (_Slot(), _Slot())


def _wait(opened: Future[Group] | None, started: Sequence[Future[Callable[[], None]]]) -> None:
    """The end of a bucket's collectives, on their thread. When one fails, so do those of all who wait in the group."""
    try:
        for future in started:
            future.result(0)()
    except RuntimeError:
        if opened is not None:
            opened.result(0).close()
        raise


class _Slot:
    """One bucket on its way: memory that small tensors are packed into, its collectives, and their end."""

    def __init__(self) -> None:
        self.started: list[Future[Callable[[], None]]] = []
        self.over: Future[None] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int, device: str) -> torch.Tensor:
        """uint8 [num_bytes] for packing, the same as for the bucket before when that was enough."""
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._memory[:num_bytes]


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
        self._verifying: list[Future[None]] = []
        self._verifier = Lane("verify")
        self._last: tuple[str, int] | None = None

    def load(self, bucket: BroadcastBucket) -> None:
        """Take part in a bucket's collectives; each is verified during the next, the last one before this returns.

        A repeated bucket is not received again: its collectives are over.

        Raises:
            WeightUpdateError: names what is wrong with this bucket or the one before.
        """
        staging = self.staging(bucket.update_id)
        if self._last == (bucket.update_id, bucket.index):
            return
        transfers = bucket.transfers or ((0, bucket.num_bytes),)
        group = self._join(bucket)
        # Tensors that came whole stay where they came: what is received here is what will serve.
        memory = self.memory.take(bucket.num_bytes)
        before, self._verifying = self._verifying, []
        try:
            _check_inside(transfers, bucket.num_bytes)
            arriving = [self._receive(group, memory[begin : begin + length]) for begin, length in transfers]
            for here, arrived in zip(_by_transfer(bucket.tensors, transfers), arriving, strict=True):
                arrived()
                self._verifying.append(self._verifier.submit(partial(_verify, staging, bucket, here, memory)))
        except RuntimeError as error:
            self._leave()
            raise WeightUpdateError(f"bucket {bucket.index} did not arrive: {error}") from error
        except WeightUpdateError:
            self._leave()
            raise
        self._last = (bucket.update_id, bucket.index)
        _settle(before)
        if bucket.last:
            self._settle()

    def _receive(self, group: Group, memory: Bytes) -> Callable[[], None]:
        """Start one collective into host memory; the result waits until it is there."""
        host = torch.from_numpy(memory)
        if not len(host):
            return lambda: None
        if self._device == "cpu":
            return group.broadcast(host, SENDER_RANK)
        on_device = torch.empty_like(host, device=self._device)
        wait = group.broadcast(on_device, SENDER_RANK)

        def arrived() -> None:
            wait()
            host.copy_(on_device)

        return arrived

    def commit(self, update_id: str) -> None:
        self._settle()
        super().commit(update_id)

    def rollback(self, update_id: str) -> None:
        self._verifying = []
        super().rollback(update_id)

    def close(self) -> None:
        """Leave the group and end the thread."""
        self._leave()
        self._verifier.close()

    def _settle(self) -> None:
        verifying, self._verifying = self._verifying, []
        _settle(verifying)

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


def _settle(verifying: Sequence[Future[None]]) -> None:
    for future in verifying:
        future.result()


def _verify(staging: Staging, bucket: BroadcastBucket, tensors: Sequence[ShmTensor], memory: Bytes) -> None:
    """Verify tensors of a bucket that are in `memory`, and leave them there if they are whole."""
    for placed in tensors:
        data = memory[placed.offset : placed.offset + placed.spec.num_bytes]
        if bucket.part_of is None:
            staging.adopt(placed.spec, data)
        else:
            staging.put(placed.spec, data, bucket.part_of, bucket.part_start)


def _by_transfer(tensors: Sequence[ShmTensor], transfers: Sequence[tuple[int, int]]) -> list[list[ShmTensor]]:
    """For each transfer the tensors that it brings whole."""
    begins = [begin for begin, _ in transfers]
    out: list[list[ShmTensor]] = [[] for _ in transfers]
    for placed in tensors:
        number = bisect_right(begins, placed.offset) - 1
        if number >= 0 and placed.offset + placed.spec.num_bytes <= sum(transfers[number]):
            out[number].append(placed)
    return out


def _check_inside(transfers: Sequence[tuple[int, int]], num_bytes: int) -> None:
    end = 0
    for begin, length in transfers:
        if begin < end or length < 0 or begin + length > num_bytes:
            after = f"after byte {end}, in a bucket of {num_bytes}"
            raise WeightUpdateError(f"a transfer of bytes [{begin}, {begin + length}) {after}")
        end = begin + length
