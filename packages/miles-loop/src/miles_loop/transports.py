"""How an update reaches engines over HTTP: the driver's end of each transport. Needs no torch.

Before an update the transport connects sender and engines, outside the pause: a group is formed anew whenever its
members have changed, so that nobody waits for an engine that is gone. What the transaction then sees are engines
whose calls speak the transport and the engine's kind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from miles_contracts import (
    DeadlineExceededError,
    Engine,
    EngineError,
    GroupRequest,
    InvalidFieldError,
    MilesError,
    ShmBucket,
    WeightUpdateError,
)
from miles_contracts.engine_proxy import EngineProxy
from miles_loop.ports import Port
from miles_loop.sglang_checksums import ChecksumSource, TrainerChecks
from miles_loop.sglang_disk import SglangDiskEngine
from miles_loop.sglang_weights import SglangFleet, flattened
from miles_rollout.engine_client import EngineClient
from miles_rollout.engine_identity import EngineKind
from miles_sync.disk import DeltaSubscriber, DiskEngine, FolderStore
from miles_sync.messages import BroadcastBucket, GroupOffer, HandleBucket, PeerBucket


class NotConnectedError(WeightUpdateError):
    """An engine could not be brought into the next update; `engine` is its url. Nothing was changed anywhere."""


class Sender(ChecksumSource, Protocol):
    """The trainer, as far as it has to be told who receives, and knows what they have then."""

    async def connect(self, receivers: Sequence[str], *, split: bool, digests: bool = True) -> GroupOffer | None:
        """From now on these receive; the group that they have to join, if any.

        `split`: all of them take a large tensor in pieces; `digests`: any of them compares digests.
        """


class FleetTransport(Protocol):
    """What a fleet asks of a transport."""

    async def connect(self, clients: Sequence[EngineClient]) -> list[Engine]:
        """These engines are updated next: the same ones as the transaction has to address them.

        Raises:
            NotConnectedError: an engine does not answer, or did not join.
            InvalidFieldError: an engine of a kind that this transport does not reach.
        """

    def reset(self) -> None:
        """An update has failed or an engine was restarted: connect anew before the next one."""


class LocalTransport:
    """Memory of this machine: embedded engines open the files that a bucket names, SGLang opens memory by handle.

    Args:
        sender: makes the handles; without one SGLang is not reached.
        flush, verify: as of `BroadcastTransport`.
        check_host: refuse an SGLang that is not on this machine; False where others see to that.
    """

    def __init__(
        self, sender: Sender | None = None, *, flush: bool = True, verify: bool = True, check_host: bool = True
    ) -> None:
        self._sender, self._check_host = sender, check_host
        self._sglang = SglangFleet(flush=flush, trainer=sender, verify=verify)
        self._members: tuple[str, ...] | None = ()

    async def connect(self, clients: Sequence[EngineClient]) -> list[Engine]:
        """Tell the sender for whom it makes handles, when these are others than before."""
        sglang = [client for client in clients if await _kind(client) is EngineKind.SGLANG]
        names = {client.url: await self._handle_names(client) for client in sglang}
        # Where everybody opens files the sender has to know nobody.
        members = tuple(n for c in clients for n in names.get(c.url, (c.url,))) if sglang else ()
        if members != self._members:
            self._members = None
            if self._sender is not None:
                digests = len(sglang) < len(clients)  # SGLang compares none
                await self._sender.connect(members, split=not sglang, digests=digests)
            self._members = members
        return [self._sglang.engine(c) if c in sglang else FileEngine(c) for c in clients]

    async def _handle_names(self, client: EngineClient) -> tuple[str, ...]:
        host = urlsplit(client.address).hostname or ""
        if self._sender is None or (self._check_host and not _is_here(host)):
            remedy = f"the SGLang at {client.url} is not on the trainer's machine; use broadcast or disk"
            raise InvalidFieldError("sync.transport", "local", remedy)
        try:
            return await self._sglang.handle_names(client)
        except (EngineError, DeadlineExceededError) as error:
            raise NotConnectedError(f"it does not say how many ranks it has: {error}", engine=client.url) from error

    def reset(self) -> None:
        """The trainer may be another one: tell it again."""
        if self._members != ():
            self._members = None


class DiskTransport:
    """A shared folder: this machine pulls versions into a checkpoint that its engines load.

    Args:
        store: folder that the trainer publishes in.
        checkpoint: folder of this machine's patched checkpoint; the engines have to see it.
        model: folder whose configuration and tokenizer go with every checkpoint.
        sender: says what SGLang's checksums have to be; None verifies what it has loaded no further.
    """

    def __init__(self, store: Path, checkpoint: Path, model: Path, sender: ChecksumSource | None = None) -> None:
        self._store, self._checkpoint, self._model = store, checkpoint, model
        self._checks = TrainerChecks(sender) if sender is not None else None
        self._engines: dict[str, DiskEngine] = {}
        self._subscriber: DeltaSubscriber | None = None

    async def connect(self, clients: Sequence[EngineClient]) -> list[Engine]:
        """Each engine with this host's checkpoint."""
        if self._subscriber is None:
            # The trainer has made the folder when it started.
            companions = [p for p in sorted(self._model.iterdir()) if p.is_file() and not _is_weights(p)]
            store = FolderStore(self._store)
            self._subscriber = DeltaSubscriber(store, self._checkpoint, companions=companions)
        subscriber = self._subscriber
        for client in clients:
            if client.url not in self._engines:
                self._engines[client.url] = await self._engine(client, subscriber)
        return [self._engines[client.url] for client in clients]

    async def _engine(self, client: EngineClient, subscriber: DeltaSubscriber) -> DiskEngine:
        if self._checks is None or await _kind(client) is not EngineKind.SGLANG:
            return DiskEngine(client, subscriber)
        return SglangDiskEngine(client, subscriber, self._checks)

    def reset(self) -> None:
        """An engine that was restarted is an engine like any other."""


class BroadcastTransport:
    """A group of the trainer and all engine ranks, by SGLang's native calls.

    Args:
        sender: opens the group.
        flush: SGLang forgets its cached prefixes with an update; it refuses while requests are frozen in place.
        verify: SGLang's checksums are held against the trainer's.
    """

    def __init__(self, sender: Sender, *, flush: bool = True, verify: bool = True) -> None:
        self._sender = sender
        self._sglang = SglangFleet(flush=flush, trainer=sender, verify=verify)
        self._members: tuple[str, ...] = ()
        self._group = ""

    async def connect(self, clients: Sequence[EngineClient]) -> list[Engine]:
        """Form the group anew when other engines are in it, or when it was given up."""
        sizes = {}
        for client in clients:
            sizes[client.url] = await self._ranks(client) if await _kind(client) is EngineKind.SGLANG else 1
        sglang = [c for c in clients if await _kind(c) is EngineKind.SGLANG]
        members = tuple(f"{url}#{rank}" for url, count in sizes.items() for rank in range(count))
        if members != self._members:
            old, self._members = self._group, ()
            digests = len(sglang) < len(clients)  # SGLang compares none
            offer = await self._sender.connect(members, split=not sglang, digests=digests)
            assert offer is not None  # the broadcast sender always opens a group
            if old:
                await asyncio.gather(*(_leave(client, old) for client in clients))
            await self._join(clients, sizes, offer)
            self._members, self._group = members, offer.group
        return [
            self._sglang.engine(client) if client in sglang else BroadcastEngine(client, self._group)
            for client in clients
        ]

    async def _ranks(self, client: EngineClient) -> int:
        try:
            return await self._sglang.ranks(client)
        except (EngineError, DeadlineExceededError) as error:
            raise NotConnectedError(f"it does not say how many ranks it has: {error}", engine=client.url) from error

    async def _join(self, clients: Sequence[EngineClient], sizes: dict[str, int], offer: GroupOffer) -> None:
        rank = 1
        joining = []
        for client in clients:
            request = GroupRequest(
                master_address=offer.host,
                master_port=offer.port,
                rank_offset=rank,
                world_size=offer.size,
                group_name=offer.group,
                backend=offer.backend,
                timeout_s=offer.timeout_s,
            )
            joining.append(_join(client, request))
            rank += sizes[client.url]
        await asyncio.gather(*joining)

    def reset(self) -> None:
        """The group may have a hole: the next update forms another one."""
        self._members = ()


class PeerTransport:
    """All ranks of the trainer write into the memory of every engine.

    Args:
        sender: is told where to write.
        backend: name of the weight group's backend in the engines.
        timeout_s: of each write.
        senders: ranks of the trainer.
    """

    def __init__(self, sender: Sender, backend: str, timeout_s: float, senders: int = 1) -> None:
        self._sender, self._backend, self._timeout_s, self._senders = sender, backend, timeout_s, senders
        self._members: tuple[str, ...] = ()

    async def connect(self, clients: Sequence[EngineClient]) -> list[Engine]:
        """Every engine exposes its memory, when other engines take part than before."""
        for client in clients:
            if await _kind(client) is EngineKind.SGLANG:
                remedy = f"the SGLang at {client.url} is no peer of this transport; use broadcast or disk"
                raise InvalidFieldError("sync.transport", "peer", remedy)
        members = tuple(client.url for client in clients)
        if members != self._members:
            self._members = ()
            addresses = await asyncio.gather(*(self._expose(c, i, len(clients)) for i, c in enumerate(clients)))
            await self._sender.connect(addresses, split=False)
            self._members = members
        return [PeerEngine(client) for client in clients]

    async def _expose(self, client: EngineClient, index: int, count: int) -> str:
        request = GroupRequest(
            master_address=urlsplit(client.address).hostname or "",
            master_port=0,
            rank_offset=self._senders + index,
            world_size=self._senders + count,
            group_name=PEER_GROUP,
            backend=self._backend,
            timeout_s=self._timeout_s,
            senders=self._senders if self._senders > 1 else msgspec.UNSET,
        )
        answer = await _join(client, request)
        return str(answer.get("address", ""))

    def reset(self) -> None:
        """A restarted engine has other memory."""
        self._members = ()


PEER_GROUP = "miles_peers"
"""Joining it again replaces the memory that an engine exposed before."""


class BroadcastEngine(EngineProxy):
    """An embedded engine that receives broadcasts."""

    def __init__(self, client: EngineClient, group: str) -> None:
        super().__init__(client)
        self._client, self._group = client, group

    async def load_bucket(self, bucket: Any) -> None:
        """Take part in the collective that the bucket describes; digests are verified before the last answer."""
        assert isinstance(bucket, BroadcastBucket)
        body = flattened(bucket)
        body["digests"] = [placed.spec.digest for placed in bucket.tensors]
        body |= {"update_id": bucket.update_id, "index": bucket.index, "last": bucket.last}
        if bucket.transfers:
            body |= {"load_format": "miles_transfers", "transfers": bucket.transfers}
            body["offsets"] = [placed.offset for placed in bucket.tensors]
        if bucket.part_of is not None:
            body |= {"part_of": msgspec.to_builtins(bucket.part_of), "part_start": bucket.part_start}
        what = f"bucket {bucket.index} of weight update {bucket.update_id}"
        await self._client.weight_call("/update_weights_from_distributed", body, what)


class FileEngine(EngineProxy):
    """An embedded engine that opens the files of buckets, also of those that others open by handle."""

    async def load_bucket(self, bucket: Any) -> None:
        """Have the engine copy and verify the file."""
        file = bucket.file if isinstance(bucket, HandleBucket) else bucket
        assert isinstance(file, ShmBucket)  # the sender leaves files out only where nobody opens them
        await super().load_bucket(file)


class PeerEngine(EngineProxy):
    """An embedded engine whose memory the trainer writes."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self._client = client

    async def load_bucket(self, bucket: Any) -> None:
        """Have the engine verify and stage what was written."""
        assert isinstance(bucket, PeerBucket)
        body = {
            "group_name": PEER_GROUP,
            "update_id": bucket.update_id,
            "index": bucket.index,
            "written": msgspec.to_builtins(bucket.written),
        }
        what = f"round {bucket.index} of weight update {bucket.update_id}"
        await self._client.weight_call("/update_weights_from_distributed", body, what)


def _is_here(host: str) -> bool:
    """Whether this machine has the address: only then can it be listened on."""
    try:
        Port(host).close()
    except OSError:
        return False
    return True


async def _kind(client: EngineClient) -> EngineKind:
    try:
        return (await client.identify()).kind
    except (EngineError, DeadlineExceededError) as error:
        raise NotConnectedError(f"it does not say what it is: {error}", engine=client.url) from error


async def _join(client: EngineClient, request: GroupRequest) -> dict[str, Any]:
    try:
        return await client.join_weight_group(request)
    except (EngineError, DeadlineExceededError) as error:
        raise NotConnectedError(f"it did not join the weight group: {error}", engine=client.url) from error


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json")


async def _leave(client: EngineClient, group: str) -> None:
    """Housekeeping: an engine that was restarted is not in the old group."""
    with contextlib.suppress(MilesError):
        await client.leave_weight_group(group)
