"""Peer-to-peer inside an engine server: a weight group whose transfers are one-sided writes into this process.

    engine     join: expose a region ----- address ----->  sender
    sender     writes tensors into the region, announces what it wrote with digests
    engine     receive: copy it out of the region, verify the copy, stage it

Nobody writes to the copies: what was verified is what will serve, whatever a late or dead writer does to the region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import (
    DTYPE_BYTES,
    Arrival,
    GroupRequest,
    InvalidFieldError,
    TensorSpec,
    WeightGroup,
    WeightGroupFactory,
    WeightUpdateError,
    digest,
)
from miles_contracts.alignment import aligned
from miles_contracts.recycling import Recycler
from miles_sync.layout import whole
from miles_sync.messages import Written, peer_group_backend
from miles_sync.peer.memory import Arena, PeerBackend
from miles_sync.peer.shared import SharedBackend
from miles_sync.peer.tcp import TcpBackend
from miles_sync.runs import Bytes
from miles_sync.transfer import Transfer, plan_transfers, runs


def make_backend(
    kind: str, *, host: str = "127.0.0.1", directory: str = "/dev/shm", timeout_s: float = 60.0
) -> PeerBackend:
    """The backend of this kind: `tcp` (listens on `host`), `shared` (files in `directory`) or `nixl`.

    Raises:
        InvalidFieldError: another kind.
        ImportError: nixl is not installed.
    """
    if kind == "tcp":
        return TcpBackend(host, timeout_s)
    if kind == "shared":
        return SharedBackend(Path(directory))
    if kind == "nixl":
        from miles_sync.peer.nixl import NixlBackend

        return NixlBackend(timeout_s)
    raise InvalidFieldError("peer_backend", kind, "use tcp, shared or nixl")


def peer_factories(directory: str = "/dev/shm") -> dict[str, WeightGroupFactory]:
    """What an engine server has to be given to be a peer, by the backend's name in `/init_weights_update_group`."""

    copies = Recycler()  # of the engine, whatever groups it joins one after the other

    def factory(kind: str) -> Callable[[GroupRequest, Sequence[TensorSpec]], WeightGroup]:
        def join(request: GroupRequest, specs: Sequence[TensorSpec]) -> WeightGroup:
            # The engine is asked to join by an address of its own: where its peers reach it.
            backend = make_backend(kind, host=request.master_address, directory=directory, timeout_s=request.timeout_s)
            return PeerGroup(request, specs, backend, copies)

        return join

    return {peer_group_backend(kind): factory(kind) for kind in ("tcp", "shared", "nixl")}


class PeerGroup:
    """An engine that holds the whole model; its rank in the plan is that in the group, behind those of the senders.

    Args:
        request: who we are among how many.
        specs: what the engine holds.
        backend: exposes the region.
        copies: what the region is copied into. It is never written again while a tensor lies in it, so it may serve.
    """

    def __init__(
        self, request: GroupRequest, specs: Sequence[TensorSpec], backend: PeerBackend, copies: Recycler
    ) -> None:
        self._copies = copies
        senders = 1 if request.senders is msgspec.UNSET else request.senders
        rank = request.rank_offset - senders
        sources, targets = whole(tuple(specs), senders), whole(tuple(specs), request.world_size - senders)
        self._arena = Arena(targets.ranks[rank])
        transfers = plan_transfers(sources, targets).transfers
        self._mine = {number: t for number, t in enumerate(transfers) if t.target == rank}
        self._memory = backend.expose(self._arena.num_bytes)
        self.address = f"{fingerprint(specs)} {self._memory.handle}"

    def receive(self, bucket: Mapping[str, Any]) -> Sequence[Arrival]:
        """Copy out what was written here, with the digests that the writers state."""
        try:
            written = msgspec.convert(bucket.get("written"), tuple[Written, ...])
        except msgspec.ValidationError as error:
            raise InvalidFieldError("written", type(bucket.get("written")).__name__, str(error)) from error
        # The others are other engines'.
        mine = [(self._mine[one.transfer], one.digest) for one in written if one.transfer in self._mine]
        begins = list(accumulate((aligned(transfer.num_bytes) for transfer, _ in mine), initial=0))
        memory = self._copies.take(begins[-1])
        return [
            self._arrival(transfer, stated, memory[begin : begin + transfer.num_bytes])
            for (transfer, stated), begin in zip(mine, begins, strict=False)
        ]

    def _arrival(self, transfer: Transfer, stated: str | None, data: Bytes) -> Arrival:
        """A whole tensor, or the rows of it that one sender wrote, copied to `data`."""
        whole_spec = self._arena.specs[transfer.name]
        # Nothing is cut but the first dimension with an extent, so a part is contiguous here as well.
        offsets, _ = runs(transfer.shape, whole_spec.shape, transfer.target_at, DTYPE_BYTES[whole_spec.dtype])
        start, size = int(offsets[0]), transfer.num_bytes
        begin = self._arena.offsets[transfer.name] + start
        data[:] = self._memory.data[begin : begin + size]
        if size == whole_spec.num_bytes:
            return Arrival(spec=msgspec.structs.replace(whole_spec, digest=stated), data=data, owned=True)
        piece = TensorSpec(name=transfer.name, dtype="uint8", shape=(size,), digest=stated)
        return Arrival(spec=piece, data=data, owned=True, part_of=whole_spec, part_start=start)

    def close(self) -> None:
        """Give the region up."""
        self._memory.close()


def fingerprint(specs: Sequence[TensorSpec]) -> str:
    """Tells whether two sides lay a region out alike."""
    return digest(msgspec.json.encode([(s.name, s.dtype, s.shape) for s in specs]))


def split_address(address: str, specs: Sequence[TensorSpec]) -> str:
    """The handle in an engine's address.

    Raises:
        WeightUpdateError: its region is not laid out for these tensors.
    """
    stated, _, handle = address.partition(" ")
    if stated != fingerprint(specs):
        raise WeightUpdateError(
            "an engine does not hold the names, dtypes and shapes that the trainer sends; with the peer transport "
            "engine.dtype has to be the trainer's"
        )
    return handle
