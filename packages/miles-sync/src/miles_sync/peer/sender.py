"""The source side of peer-to-peer: each trainer rank writes its part of the plan and says what it wrote.

Engines compare what lies in their memory with the digests of who wrote it. That cannot tell that a replica has drifted
away from the others, so the sources compare themselves: a round becomes known to engines once a second holder of each
box has found the same digest in its own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec, WeightManifest, WeightUpdateError, digest
from miles_sync.buckets import DEFAULT_BUCKET_BYTES
from miles_sync.layout import Index, Layout
from miles_sync.messages import PeerBucket, Written
from miles_sync.peer.memory import Arena, PeerWriter, Write
from miles_sync.runs import Bytes, take_runs
from miles_sync.tensors import flat_bytes
from miles_sync.transfer import Copy, Transfer, TransferPlan, aligned_runs, plan_transfers, runs


class SourcesDifferError(WeightUpdateError):
    """Two source ranks that should hold the same bytes do not: neither can be trusted.

    Attributes:
        ranks: the one that wrote and the one that could not confirm it.
    """

    def __init__(self, ranks: tuple[int, int], tensor: str) -> None:
        super().__init__(f"source ranks {ranks[0]} and {ranks[1]} hold different bytes of it", tensor=tensor)
        self.ranks = ranks


def merge(plan: TransferPlan, buckets: Sequence[PeerBucket]) -> PeerBucket:
    """The same round of all source ranks, in their order, as one message; what each wrote has been confirmed.

    Raises:
        SourcesDifferError: replicas of a tensor have drifted apart.
        WeightUpdateError: a rank confirms what nobody wrote.
        InvalidFieldError: they are of different rounds or updates.
    """
    first = buckets[0]
    for bucket in buckets:
        if (bucket.update_id, bucket.index) != (first.update_id, first.index):
            raise InvalidFieldError("buckets", bucket.index, f"all of round {first.index} of {first.update_id}")
    digests = {one.transfer: one.digest for bucket in buckets for one in bucket.written}
    for rank, bucket in enumerate(buckets):
        for one in bucket.confirmed:
            transfer = plan.transfers[one.transfer]
            if one.transfer not in digests:
                raise WeightUpdateError(f"source rank {transfer.source} has not written it", tensor=transfer.name)
            if one.digest != digests[one.transfer]:
                raise SourcesDifferError((transfer.source, rank), transfer.name)
    written = tuple(one for bucket in buckets for one in bucket.written)
    return msgspec.structs.replace(first, written=written, confirmed=())


class PeerSender:
    """One source rank.

    Of what other ranks write of boxes that this one holds too, it tells the digests of its own bytes: each box that
    two ranks hold is confirmed by one that does not write it.

    Args:
        source, target: layouts of both sides; all ranks derive the same plan from them.
        rank: ours in the source layout.
        writer: of the backend.
        handles: the target ranks' regions, by rank; may be replaced when an engine was restarted.
        bucket_bytes: bytes of the model per round; a round is announced when it is written.
        digests: whether transfers carry digests; without them nothing is confirmed either.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        rank: int,
        writer: PeerWriter,
        handles: Sequence[str],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        digests: bool = True,
    ) -> None:
        if len(handles) != len(target.ranks):
            raise InvalidFieldError("handles", len(handles), f"one for each of the {len(target.ranks)} target ranks")
        self.handles = list(handles)
        self.plan: TransferPlan = plan_transfers(source, target)
        self._rank, self._writer, self._digests = rank, writer, digests
        self._rounds = [self._own(numbers) for numbers in plan_rounds(self.plan, bucket_bytes)]
        self._source_specs = {spec.name: spec for spec in source.ranks[rank].stored}
        self._arenas = [Arena(layout) for layout in target.ranks]
        self._expected = [(s.name, s.dtype, s.shape) for s in source.tensors]

    def send(
        self,
        stored: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        manifest: WeightManifest,
        update_id: str,
    ) -> Iterator[PeerBucket]:
        """Write round by round; a yielded round is in the targets' memory.

        Args:
            stored: this rank's stored tensors.

        Raises:
            WeightUpdateError: a tensor is missing or not as in the layout, or a target is gone.
        """
        if [(s.name, s.dtype, s.shape) for s in manifest.tensors] != sorted(self._expected):
            raise WeightUpdateError("the manifest is not of the model that the transfer plan was made for")
        tensors = dict(stored)
        for name in {copy.stored for copies in self._rounds for _, copy in copies}:
            self._check(name, tensors)
        for index, copies in enumerate(self._rounds):
            yield self._write_round(copies, _Boxes(self._source_specs, tensors), update_id, index)

    def _own(self, numbers: Sequence[int]) -> list[tuple[int, Copy]]:
        """Transfers that we send or confirm, with our copies of their boxes."""
        own = []
        for number in numbers:
            transfer = self.plan.transfers[number]
            if transfer.source == self._rank:
                own.append((number, Copy(rank=self._rank, stored=transfer.source_stored, at=transfer.source_at)))
            elif self._digests and transfer.confirmer is not None and transfer.confirmer.rank == self._rank:
                own.append((number, transfer.confirmer))
        return own

    def acknowledge(self, update_id: str, index: int) -> None:
        """The source's tensors are read in place: nothing to free."""

    def release(self, update_id: str) -> None:
        """Nothing is kept between updates."""

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def _check(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        spec = self._source_specs[name]
        tensor = tensors.get(name)
        if tensor is None:
            raise WeightUpdateError("this rank's layout has it, the export does not", tensor=name)
        if tuple(tensor.shape) != spec.shape or tensor.nbytes != spec.num_bytes:
            stated = f"{spec.dtype}{list(spec.shape)}"
            raise WeightUpdateError(f"the layout says {stated}, it is {tensor.dtype}{list(tensor.shape)}", tensor=name)

    def _write_round(self, copies: Sequence[tuple[int, Copy]], boxes: _Boxes, update_id: str, index: int) -> PeerBucket:
        by_target: dict[int, list[Write]] = {}
        written, confirmed = [], []
        for number, copy in copies:
            transfer = self.plan.transfers[number]
            if transfer.source != self._rank:
                confirmed.append(Written(transfer=number, digest=boxes.digest(copy, transfer.shape)))
                continue
            arena = self._arenas[transfer.target]
            target = arena.specs[transfer.target_stored]
            _, tos, length = aligned_runs(transfer, self._source_specs[copy.stored], target)
            packed = boxes.packed(copy, transfer.shape)
            write = Write(data=packed, offsets=tos + arena.offsets[transfer.target_stored], length=length)
            by_target.setdefault(transfer.target, []).append(write)
            found = boxes.digest(copy, transfer.shape) if self._digests else None
            written.append(Written(transfer=number, digest=found))
        # Each rank begins with another target, or all of them would queue at the first one.
        for number in sorted(by_target, key=lambda n: (n - self._rank) % len(self.handles)):
            self._writer.write(self.handles[number], by_target[number])
        return PeerBucket(update_id=update_id, index=index, written=tuple(written), confirmed=tuple(confirmed))


class _Boxes:
    """Bytes of boxes of this rank's stored tensors during one round: each is read and digested once.

    Args:
        specs: of the stored tensors.
        tensors: on any device; only rows that are asked for are brought to the host.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]) -> None:
        self._specs, self._tensors = specs, tensors
        self._rows: dict[tuple[str, int, int], Bytes] = {}
        self._packed: dict[tuple[Copy, Index], Bytes] = {}
        self._digests: dict[tuple[Copy, Index], str] = {}

    def digest(self, copy: Copy, shape: Index) -> str:
        """Of the box's bytes in row-major order."""
        key = (copy, shape)
        if key not in self._digests:
            packed = self._packed.get(key)
            self._digests[key] = digest((self._take(copy, shape) if packed is None else packed).data)
        return self._digests[key]

    def packed(self, copy: Copy, shape: Index) -> Bytes:
        """The box's bytes in row-major order: a view where they lie so."""
        key = (copy, shape)
        if key not in self._packed:
            self._packed[key] = self._take(copy, shape)
        return self._packed[key]

    def _take(self, copy: Copy, shape: Index) -> Bytes:
        spec = self._specs[copy.stored]
        offsets, length = runs(shape, spec.shape, copy.at, DTYPE_BYTES[spec.dtype])
        begin, end = 0, spec.num_bytes
        if spec.shape:
            row = spec.num_bytes // spec.shape[0]
            extent = shape[0] if len(shape) == len(spec.shape) else 1
            begin, end = copy.at[0] * row, (copy.at[0] + extent) * row
        return take_runs(self._on_host(copy.stored, begin, end), offsets - begin, length)

    def _on_host(self, name: str, begin: int, end: int) -> Bytes:
        key = (name, begin, end)
        if key not in self._rows:
            self._rows[key] = flat_bytes(self._tensors[name])[begin:end].cpu().numpy()
        return self._rows[key]


def plan_rounds(plan: TransferPlan, bucket_bytes: int) -> list[list[int]]:
    """Numbers of transfers per round, in the order of the tensors, each round about `bucket_bytes` or one transfer."""
    order = sorted(range(len(plan.transfers)), key=lambda n: (plan.transfers[n].name, n))
    rounds: list[list[int]] = []
    size = 0
    for number in order:
        num_bytes = plan.transfers[number].num_bytes
        if not rounds or size + num_bytes > bucket_bytes:
            rounds.append([])
            size = 0
        rounds[-1].append(number)
        size += num_bytes
    return rounds


def box_bytes(transfer: Transfer, arena: Arena, region: Bytes) -> Bytes:
    """Bytes of a transfer's box as they lie in the target's region, in row-major order."""
    target = arena.specs[transfer.target_stored]
    offsets, length = runs(transfer.shape, target.shape, transfer.target_at, DTYPE_BYTES[target.dtype])
    return take_runs(region, offsets + arena.offsets[transfer.target_stored], length)
