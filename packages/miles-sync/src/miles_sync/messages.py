"""What a sender announces to receivers, one message a bucket: plain data that needs no torch."""

from __future__ import annotations

import msgspec

from miles_contracts import ShmBucket, ShmTensor, TensorSpec


class BroadcastBucket(msgspec.Struct, frozen=True, kw_only=True, tag="broadcast_bucket"):
    """What the next collectives bring.

    Attributes:
        group: name of the group; a receiver joins it when it is new.
        host, port: the meeting point of the group.
        receivers: names of the receivers; the i-th has rank i + 1.
        num_bytes: bytes of the bucket.
        tensors: what lies where in it.
        transfers: (first byte, length) of each collective, in order; none: one of the whole bucket, in which the
            tensors lie without gaps.
        update_id, index, part_of, part_start: as in `ShmBucket`.
        last: no other bucket of this update comes after it.
    """

    group: str
    host: str
    port: int
    receivers: tuple[str, ...]
    num_bytes: int
    tensors: tuple[ShmTensor, ...]
    update_id: str
    index: int
    transfers: tuple[tuple[int, int], ...] = ()
    part_of: TensorSpec | None = None
    part_start: int = 0
    last: bool = False


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer of the plan that is in the target's memory.

    Attributes:
        transfer: its number in the plan.
        digest: of the box's bytes in row-major order, None when digests are off.
    """

    transfer: int
    digest: str | None


class PeerBucket(msgspec.Struct, frozen=True, kw_only=True, tag="peer_bucket"):
    """What was written since the bucket before, by all sources together.

    Attributes:
        update_id, index: as in `ShmBucket`.
        written: by the sources that speak here.
        confirmed: what others write meanwhile, as these sources hold it: for the sources to compare among themselves,
            before engines are told.
    """

    update_id: str
    index: int
    written: tuple[Written, ...]
    confirmed: tuple[Written, ...] = ()


class HandleBucket(msgspec.Struct, frozen=True, kw_only=True, tag="handle_bucket"):
    """Memory of this host that receivers open by handle.

    Attributes:
        update_id, index, last: as in `BroadcastBucket`.
        num_bytes: bytes of the bucket.
        handles: by name of the receiver (`handle_name`), for it alone: a pickle that torch makes of memory that it
            passes on, in the form of SGLang's `flattened_bucket`. It is forwarded and never read here.
        file: the same bytes for receivers that open files; None when they are in a device's memory.
    """

    update_id: str
    index: int
    num_bytes: int
    handles: dict[str, bytes]
    file: ShmBucket | None = None
    last: bool = False

    def handles_of(self, url: str) -> list[bytes]:
        """Those of one engine, in the order of its ranks."""
        ranks: dict[int, bytes] = {}
        for name, handle in self.handles.items():
            engine, _, rest = name.rpartition("#")
            if engine == url:
                ranks[int(rest.partition("@")[0])] = handle
        return [ranks[rank] for rank in sorted(ranks)]


def handle_name(url: str, rank: int, device: str) -> str:
    """Name of a rank of an engine that takes handles, of host memory and of memory on its own kind of device."""
    return f"{url}#{rank}@{device}"


def handle_device(name: str) -> str | None:
    """The kind of device in a name of `handle_name`, None for every other name."""
    _, mark, rest = name.rpartition("#")
    return rest.partition("@")[2] or None if mark else None


class DiskBucket(msgspec.Struct, frozen=True, kw_only=True, tag="disk_bucket"):
    """A publication that holds the whole update."""

    update_id: str
    index: int
    publication: str


AnyBucket = ShmBucket | BroadcastBucket | HandleBucket | PeerBucket | DiskBucket
"""A bucket of any transport."""


class GroupOffer(msgspec.Struct, frozen=True, kw_only=True, tag="group_offer"):
    """A group that the sender has opened and waits in.

    Attributes:
        group: its name, unique for ever.
        host, port: its meeting point, as engines reach it.
        size: its ranks, the sender's (0) included.
        backend: `gloo` or `nccl`.
        timeout_s: of the meeting and of each collective.
    """

    group: str
    host: str
    port: int
    size: int
    backend: str
    timeout_s: float


def peer_group_backend(kind: str) -> str:
    """Name of the weight group's backend for a kind of peers (`tcp`, `shared`, `nixl`)."""
    return f"miles_{kind}"
