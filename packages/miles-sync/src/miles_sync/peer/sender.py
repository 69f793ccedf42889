"""The source side of peer-to-peer: each trainer rank writes its part of the plan and says what it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from miles_contracts import DTYPE_BYTES, InvalidFieldError, WeightManifest, WeightUpdateError, digest
from miles_sync.buckets import DEFAULT_BUCKET_BYTES
from miles_sync.layout import Layout
from miles_sync.messages import PeerBucket, Written
from miles_sync.peer.memory import Arena, PeerWriter, Write
from miles_sync.runs import Bytes, take_runs
from miles_sync.tensors import flat_bytes
from miles_sync.transfer import Transfer, TransferPlan, aligned_runs, plan_transfers, runs


def merge(buckets: Sequence[PeerBucket]) -> PeerBucket:
    """The same round of several source ranks as one message.

    Raises:
        InvalidFieldError: they are of different rounds or updates.
    """
    first = buckets[0]
    for bucket in buckets:
        if (bucket.update_id, bucket.index) != (first.update_id, first.index):
            raise InvalidFieldError("buckets", bucket.index, f"all of round {first.index} of {first.update_id}")
    return msgspec.structs.replace(first, written=tuple(w for bucket in buckets for w in bucket.written))


class PeerSender:
    """One source rank.

    Args:
        source, target: layouts of both sides; all ranks derive the same plan from them.
        rank: ours in the source layout.
        writer: of the backend.
        handles: the target ranks' regions, by rank; may be replaced when an engine was restarted.
        bucket_bytes: bytes of the model per round; a round is announced when it is written.
        digests: whether transfers carry digests.
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
        self._rounds = plan_rounds(self.plan, bucket_bytes)
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
        for name in {t.source_stored for t in self.plan.transfers if t.source == self._rank}:
            self._check(name, tensors)
        for index, numbers in enumerate(self._rounds):
            yield PeerBucket(update_id=update_id, index=index, written=tuple(self._write_round(numbers, tensors)))

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

    def _write_round(self, numbers: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Written]:
        by_target: dict[int, list[Write]] = {}
        on_host: dict[str, Bytes] = {}
        for number in numbers:
            transfer = self.plan.transfers[number]
            if transfer.source != self._rank:
                continue
            source, arena = self._source_specs[transfer.source_stored], self._arenas[transfer.target]
            target = arena.specs[transfer.target_stored]
            froms, tos, length = aligned_runs(transfer, source, target)
            name = transfer.source_stored
            if name not in on_host:
                on_host[name] = flat_bytes(tensors[name]).cpu().numpy()
            packed = take_runs(on_host[name], froms, length)
            write = Write(data=packed, offsets=tos + arena.offsets[transfer.target_stored], length=length)
            by_target.setdefault(transfer.target, []).append(write)
            yield Written(transfer=number, digest=digest(packed.data) if self._digests else None)
        for rank, writes in by_target.items():
            self._writer.write(self.handles[rank], writes)


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
