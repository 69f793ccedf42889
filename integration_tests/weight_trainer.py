"""A trainer in the test's own process that sends weights to real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from miles_contracts import TensorSpec, WeightManifest, WeightUpdateError
from miles_loop.expected_checksums import ExpectedChecksums
from miles_loop.senders import JointSender, WeightSender, make_sender
from miles_loop.trainer_link import SenderSettings
from miles_sync.messages import AnyBucket, GroupOffer, PeerBucket
from miles_sync.sglang_layout import ChecksumTable, SglangForm
from miles_sync.tensors import spec_of


def manifest_of(weights: dict[str, torch.Tensor], version: int) -> WeightManifest:
    """What `weights` are, without digests."""
    return WeightManifest(version=version, tensors=tuple(spec_of(name, tensor) for name, tensor in weights.items()))


class JointSenders:
    """The senders of all ranks of a trainer group as one; each has its own thread, and all hold the same weights."""

    def __init__(self, settings: SenderSettings, ranks: int) -> None:
        self._senders = [make_sender(settings, rank, ranks) for rank in range(ranks)]
        self._pool = ThreadPoolExecutor(ranks)

    def connect(self, receivers: Sequence[str], specs: Sequence[TensorSpec], split: bool, digests: bool = True) -> None:
        for sender in self._senders:
            sender.connect(receivers, specs, split, digests)

    def send(self, tensors: Iterable[tuple[str, Any]], manifest: WeightManifest, update_id: str) -> Iterator[AnyBucket]:
        weights = list(tensors)
        sending = [sender.send(iter(weights), manifest, update_id) for sender in self._senders]
        first = self._senders[0]
        assert isinstance(first, JointSender)
        while (parts := list(self._pool.map(lambda one: next(one, None), sending)))[0] is not None:
            yield first.merge([part for part in parts if part is not None])

    def acknowledge(self, update_id: str, index: int) -> None:
        for sender in self._senders:
            sender.acknowledge(update_id, index)

    def release(self, update_id: str) -> None:
        for sender in self._senders:
            sender.release(update_id)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._pool.shutdown()


class Trainer:
    """The trainer's side of an update, with any sender, on threads as a process of its own would be.

    Attributes:
        weights: what is sent next, by canonical name, sorted.
        corrupt: tensor whose announced digest is wrong.
        stumble_at: index of the bucket at which the trainer fails.
        before: called with each bucket before it is handed out.
        model: folder of the model's configuration; without it the trainer knows no checksums of SGLang's.
        flip: tensor of which one bit is another when it is sent than it is here, and the number of that bit.
    """

    def __init__(self, sender: WeightSender, weights: dict[str, torch.Tensor]) -> None:
        self.sender, self.weights = sender, weights
        self.corrupt = ""
        self.stumble_at: int | None = None
        self.before: Any = lambda bucket: None
        self.model: Path | None = None
        self.flip: tuple[str, int] | None = None
        self._count = 0

    async def connect(self, receivers: Sequence[str], *, split: bool, digests: bool = True) -> GroupOffer | None:
        specs = manifest_of(self.weights, 0).tensors
        return await asyncio.to_thread(self.sender.connect, receivers, specs, split, digests)

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self._count += 1
        self._sent, self._manifest = self.weights, manifest_of(self.weights, version)
        specs = self._manifest.tensors
        self._expected = ExpectedChecksums(self.model, specs, 1 << 26) if self.model is not None else None
        return f"update-{version}-{self._count}-{id(self):x}", self._manifest

    async def expect_checksums(self, update_id: str, form: SglangForm) -> None:
        if self._expected is not None:
            self._expected.expect(form)

    async def checksums(self, update_id: str, form: SglangForm) -> ChecksumTable:
        if self._expected is None:
            return ChecksumTable(nothing="this trainer has no configuration of its model")
        return await asyncio.to_thread(self._expected.table, form)

    def _flipped(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """As if the bit had changed on the way."""
        name, bit = self.flip or ("", 0)
        for sent, tensor in tensors:
            if sent == name:
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            yield sent, tensor

    async def buckets(self, update_id: str) -> AsyncIterator[Any]:
        tensors = self._flipped(self._expected.tap(self._sent.items()) if self._expected else self._sent.items())
        sending = self.sender.send(tensors, self._manifest, update_id)
        while (bucket := await asyncio.to_thread(next, sending, None)) is not None:
            if bucket.index == self.stumble_at:
                raise WeightUpdateError("the trainer stumbles")
            self.before(bucket)
            yield with_wrong_digest(bucket, self.corrupt) if self.corrupt else bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        self.sender.acknowledge(update_id, index)

    async def release(self, update_id: str) -> None:
        if self._expected is not None:
            self._expected.close()
        await asyncio.to_thread(self.sender.release, update_id)


def with_wrong_digest(bucket: Any, name: str) -> Any:
    """The bucket with another digest for one tensor, as if its bits had changed on the way; peers number theirs."""
    if isinstance(bucket, PeerBucket):
        written = tuple(msgspec.structs.replace(w, digest="xxh3_128:" + "0" * 32) for w in bucket.written)
        return msgspec.structs.replace(bucket, written=written)
    placed = tuple(
        msgspec.structs.replace(p, spec=msgspec.structs.replace(p.spec, digest="xxh3_128:" + "0" * 32))
        if p.spec.name == name
        else p
        for p in bucket.tensors
    )
    return msgspec.structs.replace(bucket, tensors=placed)
