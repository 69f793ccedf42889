"""An export of canonical tensors from a sharded trainer: each byte travels once, to the one rank that sends it on.

Every rank derives the same plan from the layout. Per bucket, each rank packs what the root lacks of it into one
message; the root has the next bucket's messages under way while it hands out this one's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch

from miles_contracts import DTYPE_BYTES, TensorSpec
from miles_contracts.alignment import aligned
from miles_sync.buckets import plan_buckets
from miles_sync.group import Group
from miles_sync.layout import Layout, whole
from miles_sync.runs import put_runs, take_runs
from miles_sync.tensors import Bytes, flat_bytes, torch_dtype
from miles_sync.transfer import Transfer, plan_transfers, runs

ROOT = 0
Tensors = Mapping[str, torch.Tensor]


class GatherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of the gather.

    Attributes:
        rounds: for each round the tensors that it completes.
        transfers: for each round what the ranks send, in the order in which it lies in their messages.
    """

    rounds: tuple[tuple[TensorSpec, ...], ...]
    transfers: tuple[tuple[Transfer, ...], ...]


def plan_gather(layout: Layout, bucket_bytes: int, *, experts_apart: bool = False) -> GatherPlan:
    """Rounds of about `bucket_bytes` (at least one tensor) in the order of `plan_buckets`.

    Raises:
        InvalidFieldError: the ranks do not hold every element.
    """
    rounds: list[list[TensorSpec]] = []
    for bucket in plan_buckets(layout.tensors, bucket_bytes, experts_apart=experts_apart):
        new = [piece.spec for piece in bucket.pieces if piece.start == 0]
        if new:
            rounds.append(new)
    by_name: dict[str, list[Transfer]] = {}
    for transfer in plan_transfers(layout, whole(layout.tensors), home=ROOT).transfers:
        by_name.setdefault(transfer.name, []).append(transfer)
    transfers = [tuple(t for spec in specs for t in by_name.get(spec.name, ())) for specs in rounds]
    return GatherPlan(rounds=tuple(tuple(r) for r in rounds), transfers=tuple(transfers))


def send_shards(group: Group, layout: Layout, rank: int, stored: Tensors, plan: GatherPlan) -> None:
    """A rank other than the root: send what the plan asks of it, two rounds under way at most."""
    specs = {spec.name: spec for spec in layout.ranks[rank].stored}
    waiting: list[Callable[[], None]] = []
    for transfers in plan.transfers:
        mine = [t for t in transfers if t.source == rank]
        if not mine:
            continue
        packed = np.concatenate([_pack(t, specs[t.source_stored], stored) for t in mine])
        waiting.append(group.send(torch.from_numpy(packed), ROOT))
        if len(waiting) > 1:
            waiting.pop(0)()
    for wait in waiting:
        wait()


def gather_tensors(
    group: Group | None, layout: Layout, stored: Tensors, plan: GatherPlan
) -> Iterator[tuple[str, torch.Tensor]]:
    """The root: canonical names and whole tensors, in the plan's order. `group` is None for a single rank."""
    coming = _post(group, layout, plan.transfers[0]) if plan.rounds else {}
    for number, specs in enumerate(plan.rounds):
        for _, wait in coming.values():
            wait()
        messages = {source: memory for source, (memory, _) in coming.items()}
        last = number + 1 == len(plan.rounds)
        coming = {} if last else _post(group, layout, plan.transfers[number + 1])
        yield from _assemble(layout, stored, specs, plan.transfers[number], messages)


def _post(
    group: Group | None, layout: Layout, transfers: Sequence[Transfer]
) -> dict[int, tuple[Bytes, Callable[[], None]]]:
    sizes: dict[int, int] = {}
    for transfer in transfers:
        if transfer.source != ROOT:
            sizes[transfer.source] = sizes.get(transfer.source, 0) + transfer.num_bytes
    out: dict[int, tuple[Bytes, Callable[[], None]]] = {}
    for rank, size in sizes.items():
        assert group is not None, f"{len(layout.ranks)} ranks need a group"
        memory: Bytes = np.empty(size, np.uint8)
        out[rank] = (memory, group.receive(torch.from_numpy(memory), rank))
    return out


def _assemble(
    layout: Layout,
    stored: Tensors,
    specs: Sequence[TensorSpec],
    transfers: Sequence[Transfer],
    messages: Mapping[int, Bytes],
) -> Iterator[tuple[str, torch.Tensor]]:
    own = {spec.name: spec for spec in layout.ranks[ROOT].stored}
    taken = dict.fromkeys(messages, 0)
    grouped: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        grouped.setdefault(transfer.name, []).append(transfer)
    # Side by side in one block: a sender finds them in place, as one transfer.
    block = torch.empty(sum(aligned(spec.num_bytes) for spec in specs), dtype=torch.uint8)
    end = 0
    for spec in specs:
        flat = block[end : end + spec.num_bytes]
        end += aligned(spec.num_bytes)
        out: Bytes = flat.numpy()
        for transfer in grouped.get(spec.name, ()):
            if transfer.source == ROOT:
                packed = _pack(transfer, own[transfer.source_stored], stored)
            else:
                start = taken[transfer.source]
                packed = messages[transfer.source][start : start + transfer.num_bytes]
                taken[transfer.source] = start + transfer.num_bytes
            _unpack(transfer, spec, packed, out)
        yield spec.name, flat.view(torch_dtype(spec.dtype)).reshape(spec.shape)


def _pack(transfer: Transfer, source: TensorSpec, stored: Tensors) -> Bytes:
    """The box's bytes in row-major order."""
    froms, length = runs(transfer.shape, source.shape, transfer.source_at, DTYPE_BYTES[source.dtype])
    data: Bytes = flat_bytes(stored[transfer.source_stored]).cpu().numpy()
    return take_runs(data, froms, length)


def _unpack(transfer: Transfer, target: TensorSpec, packed: Bytes, out: Bytes) -> None:
    tos, length = runs(transfer.shape, target.shape, transfer.target_at, DTYPE_BYTES[target.dtype])
    put_runs(out, tos, length, packed)
