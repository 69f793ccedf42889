"""Peer-to-peer inside an engine server: a weight group whose transfers are one-sided writes into this process.

    engine     join: expose a region ----- address ----->  sender
    sender     writes tensors into the region, announces what it wrote with digests
    engine     receive: copy it out of the region, verify the copy, stage it

Nobody writes to the copies: what was verified is what will serve, whatever a late or dead writer does to the region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import (
    Arrival,
    GroupRequest,
    InvalidFieldError,
    TensorSpec,
    WeightGroup,
    WeightGroupFactory,
    WeightUpdateError,
    digest,
)
from miles_sync.layout import whole
from miles_sync.messages import Written, peer_group_backend
from miles_sync.peer.memory import Arena, PeerBackend
from miles_sync.peer.shared import SharedBackend
from miles_sync.peer.tcp import TcpBackend
from miles_sync.transfer import plan_transfers


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

    def factory(kind: str) -> Callable[[GroupRequest, Sequence[TensorSpec]], WeightGroup]:
        def join(request: GroupRequest, specs: Sequence[TensorSpec]) -> WeightGroup:
            # The engine is asked to join by an address of its own: where its peers reach it.
            backend = make_backend(kind, host=request.master_address, directory=directory, timeout_s=request.timeout_s)
            return PeerGroup(request, specs, backend)

        return join

    return {peer_group_backend(kind): factory(kind) for kind in ("tcp", "shared", "nixl")}


class PeerGroup:
    """An engine that holds the whole model, as target rank `rank_offset - 1` of the plan.

    Args:
        request: who we are among how many.
        specs: what the engine holds.
        backend: exposes the region.
    """

    def __init__(self, request: GroupRequest, specs: Sequence[TensorSpec], backend: PeerBackend) -> None:
        layout = whole(tuple(specs), request.world_size - 1)
        rank = request.rank_offset - 1
        self._arena = Arena(layout.ranks[rank])
        # One source rank holds everything, so a transfer is a whole tensor.
        transfers = plan_transfers(whole(tuple(specs)), layout).transfers
        self._mine = {number: t.name for number, t in enumerate(transfers) if t.target == rank}
        self._memory = backend.expose(self._arena.num_bytes)
        self.address = f"{fingerprint(specs)} {self._memory.handle}"

    def receive(self, bucket: Mapping[str, Any]) -> Sequence[Arrival]:
        """Copy out what was written here, with the digests that the writer states."""
        try:
            written = msgspec.convert(bucket.get("written"), tuple[Written, ...])
        except msgspec.ValidationError as error:
            raise InvalidFieldError("written", type(bucket.get("written")).__name__, str(error)) from error
        arrivals = []
        for one in written:
            name = self._mine.get(one.transfer)
            if name is None:
                continue  # another engine's
            spec = self._arena.specs[name]
            start = self._arena.offsets[name]
            data = self._memory.data[start : start + spec.num_bytes].copy()
            arrivals.append(Arrival(spec=msgspec.structs.replace(spec, digest=one.digest), data=data))
        return arrivals

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
