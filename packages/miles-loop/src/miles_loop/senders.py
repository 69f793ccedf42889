"""The trainer's end of each transport, made from plain settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles_contracts import InvalidFieldError, TensorSpec, WeightManifest, WeightUpdateError
from miles_loop.trainer_link import SenderSettings
from miles_sync.broadcast import BroadcastSender
from miles_sync.disk import DeltaPublisher, DiskSender, FolderStore
from miles_sync.group import Meeting
from miles_sync.handing import HandingSender
from miles_sync.layout import whole
from miles_sync.messages import AnyBucket, GroupOffer, PeerBucket
from miles_sync.peer import PeerSender, merge
from miles_sync.peer.engine import make_backend, split_address


class WeightSender(Protocol):
    """What the trainer process asks of a transport."""

    def connect(
        self, receivers: Sequence[str], specs: Sequence[TensorSpec], split: bool, digests: bool = True
    ) -> GroupOffer | None:
        """Engines have joined, left or been restarted. Returns what they have to be told, if anything.

        Args:
            receivers: their names, or their addresses where the transport writes to those.
            specs: the tensors of the model.
            split: whether every receiver takes a large tensor in pieces.
            digests: whether any receiver compares digests; where none does, weights on a device need not pass the host.
        """

    def send(self, tensors: Iterable[tuple[str, Any]], manifest: WeightManifest, update_id: str) -> Iterator[AnyBucket]:
        """Send an update bucket by bucket."""

    def acknowledge(self, update_id: str, index: int) -> None:
        """Every engine has this bucket."""

    def release(self, update_id: str) -> None:
        """The update is over."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class JointSender(Protocol):
    """A `WeightSender` of a transport that all ranks of a trainer group send by, each its own part of every bucket."""

    def merge(self, buckets: Sequence[AnyBucket]) -> AnyBucket:
        """The parts of one bucket, in the order of ranks, as one.

        Raises:
            SourcesDifferError: the ranks do not hold the same weights.
        """


def every_rank_sends(settings: SenderSettings) -> bool:
    """Whether each rank of a trainer group has a sender; with other transports rank 0 alone has one."""
    return settings.transport == "peer"


def make_sender(settings: SenderSettings, rank: int = 0, ranks: int = 1) -> WeightSender:
    """The sender of the transport that the settings name, for one of the ranks that send."""
    makers: dict[str, Callable[[SenderSettings], WeightSender]]
    peer = partial(_Peer, rank=rank, ranks=ranks)
    makers = {"local": _Local, "broadcast": _Broadcast, "peer": peer, "disk": _Disk}
    maker = makers.get(settings.transport)
    if maker is None:
        raise InvalidFieldError("sync.transport", settings.transport, f"use one of {', '.join(makers)}")
    with _as_the_user_knows_it():
        return maker(settings)


@contextmanager
def _as_the_user_knows_it() -> Iterator[None]:
    try:
        yield
    except InvalidFieldError as error:
        if error.field != "directory":
            raise
        raise InvalidFieldError("sync.directory", error.value, error.remedy) from error


class _Local(HandingSender):
    """Shared memory: receivers open what is announced, files or handles."""

    def __init__(self, settings: SenderSettings) -> None:
        super().__init__(Path(settings.directory), settings.bucket_bytes)

    def connect(self, receivers: Sequence[str], specs: Sequence[TensorSpec], split: bool, digests: bool = True) -> None:
        """Only those that take handles have to be known.

        Raises:
            InvalidFieldError: the shared-memory mount has no handles.
        """
        with _as_the_user_knows_it():
            self.set_receivers(receivers, digests=digests)


class _Broadcast(BroadcastSender):
    """A new group for each set of receivers."""

    def __init__(self, settings: SenderSettings) -> None:
        meeting = Meeting(settings.host, 0, owner=True, timeout_s=settings.timeout_s)
        device = "cpu" if settings.backend == "gloo" else "cuda"
        super().__init__(meeting, (), settings.bucket_bytes, backend=settings.backend, device=device)

    def connect(
        self, receivers: Sequence[str], specs: Sequence[TensorSpec], split: bool, digests: bool = True
    ) -> GroupOffer:
        """Open the group that the receivers are then asked to join."""
        self.split, self.digests = split, digests
        return self.set_receivers(receivers)


class _Peer:
    """Every engine, and every rank of the trainer, holds the whole model; an engine's address names its memory."""

    def __init__(self, settings: SenderSettings, rank: int, ranks: int) -> None:
        self._bucket_bytes, self._rank, self._ranks = settings.bucket_bytes, rank, ranks
        backend = make_backend(settings.peer_backend, directory=settings.directory, timeout_s=settings.timeout_s)
        self._writer = backend.writer()
        self._sender: PeerSender | None = None

    def connect(self, receivers: Sequence[str], specs: Sequence[TensorSpec], split: bool, digests: bool = True) -> None:
        """Plan the transfers to these addresses.

        Raises:
            WeightUpdateError: an engine's memory is not laid out for what this trainer sends.
        """
        handles = [split_address(address, specs) for address in receivers]
        self._writer.keep(handles)
        source, target = whole(specs, self._ranks), whole(specs, len(handles))
        self._sender = PeerSender(source, target, self._rank, self._writer, handles, self._bucket_bytes)

    def send(
        self, tensors: Iterable[tuple[str, Any]], manifest: WeightManifest, update_id: str
    ) -> Iterator[PeerBucket]:
        """Write our part into every engine's memory, round by round."""
        return self._connected().send(tensors, manifest, update_id)

    def merge(self, buckets: Sequence[AnyBucket]) -> PeerBucket:
        """What all ranks have written in a round."""
        return merge(self._connected().plan, [bucket for bucket in buckets if isinstance(bucket, PeerBucket)])

    def _connected(self) -> PeerSender:
        if self._sender is None:
            raise WeightUpdateError("no receiver has been named yet")
        return self._sender

    def acknowledge(self, update_id: str, index: int) -> None:
        """The model's own tensors are read: nothing to free."""

    def release(self, update_id: str) -> None:
        """As `acknowledge`."""

    def close(self) -> None:
        """Close connections."""
        self._writer.close()


class _Disk(DiskSender):
    """Hosts read what is published: nobody has to be told where."""

    def __init__(self, settings: SenderSettings) -> None:
        store = Path(settings.store)
        store.mkdir(parents=True, exist_ok=True)
        super().__init__(DeltaPublisher(FolderStore(store)))

    def connect(self, receivers: Sequence[str], specs: Sequence[TensorSpec], split: bool, digests: bool = True) -> None:
        """Nobody has to be told anything."""

    def close(self) -> None:
        """Publications stay."""
