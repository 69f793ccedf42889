"""The trainer's side of disk-delta: publishes what changed since the last version, a full base first and now and then.

The first publication of a process is always full: after a restart nobody can know whether the store's last version
is the one that this process begins with.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec, WeightManifest, WeightUpdateError, digest
from miles_sync.disk.codec import MAX_CHUNK_BYTES, Bytes, Encoding, encode
from miles_sync.disk.publication import (
    Chunk,
    Publication,
    chain,
    index_key,
    part_key,
    read_latest,
    write_index,
    write_latest,
)
from miles_sync.disk.store import Store
from miles_sync.export import CheckedExport


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one publication cost.

    Attributes:
        id, version, full: which one.
        num_bytes: bytes of its parts: what travels.
        model_bytes: bytes of the model.
        changed_bytes: bytes of chunks that held any change.
    """

    id: str
    version: int
    full: bool
    num_bytes: int
    model_bytes: int
    changed_bytes: int


class DeltaPublisher:
    """Publishes versions into a store.

    It keeps the last version to compare with: the model's size once more, in memory or in a file. On top of that
    come the chunks that are being encoded and one open part.

    Args:
        store: where to.
        snapshot_dir: keep the last version in a file there instead of in memory.
        chunk_bytes: unit of encoding, a multiple of 8; bounds the memory of the encoders.
        part_bytes: a part is closed when it has at least this many bytes.
        max_chain: deltas after a full base before the next full one.
        max_chain_share: bytes of a chain's deltas, as a share of the model, before the next full base.
        keep_chains: full bases, with their deltas, that are kept; older ones are collected.
        level: zstd's.
        threads: encoders at work at once.

    Raises:
        InvalidFieldError: names the argument that is out of range.
    """

    def __init__(
        self,
        store: Store,
        *,
        snapshot_dir: Path | None = None,
        chunk_bytes: int = 8 * 1024 * 1024,
        part_bytes: int = 64 * 1024 * 1024,
        max_chain: int = 16,
        max_chain_share: float = 1.0,
        keep_chains: int = 2,
        level: int = 1,
        threads: int = 2,
    ) -> None:
        if not 8 <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % 8:
            raise InvalidFieldError("chunk_bytes", chunk_bytes, f"use a multiple of 8 from 8 to {MAX_CHUNK_BYTES}")
        for name, value in (("part_bytes", part_bytes), ("keep_chains", keep_chains), ("threads", threads)):
            if value < 1:
                raise InvalidFieldError(name, value, "use at least 1")
        if max_chain < 0:
            raise InvalidFieldError("max_chain", max_chain, "use 0 (always full) or more")
        self._store = store
        self._snapshot_dir = snapshot_dir
        self._chunk_bytes, self._part_bytes = chunk_bytes, part_bytes
        self._max_chain, self._max_chain_share, self._keep_chains = max_chain, max_chain_share, keep_chains
        self._level, self._threads = level, threads
        self._last: Publication | None = None
        self._snapshot: dict[str, Bytes] = {}
        self._chain_length = 0
        self._chain_bytes = 0

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest) -> PublishReport:
        """Publish one version; readers see it when this returns, whole.

        Raises:
            WeightUpdateError: the tensors are not the manifest's, or the disk is full. What readers see is
                unchanged, and the next publication is full.
        """
        base = self._base_for(manifest)
        # Until the index is out the snapshot is a mixture of two versions: after a failure it must not be built on.
        self._last = None
        name = f"{manifest.version:09d}-{secrets.token_hex(4)}"
        parts = _Parts(self._store, name, self._part_bytes)
        try:
            specs, chunks = self._encode_all(CheckedExport(tensors, manifest), manifest, base is not None, parts)
            parts.close()
            publication = Publication(
                id=name,
                manifest=msgspec.structs.replace(manifest, tensors=tuple(specs)),
                base=base,
                chunks=tuple(chunks),
                num_bytes=parts.total,
            )
            write_index(self._store, publication)
            write_latest(self._store, name)
        except BaseException:
            parts.discard()
            raise
        self._last = publication
        self._chain_length = self._chain_length + 1 if base else 0
        self._chain_bytes = self._chain_bytes + parts.total if base else 0
        if base is None:
            self._collect()
        return PublishReport(
            id=name,
            version=manifest.version,
            full=base is None,
            num_bytes=parts.total,
            model_bytes=manifest.num_bytes,
            changed_bytes=sum(chunk.length for chunk in chunks),
        )

    def _base_for(self, manifest: WeightManifest) -> str | None:
        last = self._last
        if last is None or self._chain_length >= self._max_chain:
            return None
        if self._chain_bytes >= self._max_chain_share * manifest.num_bytes:
            return None
        same = [(s.name, s.dtype, s.shape) for s in last.manifest.tensors] == [
            (s.name, s.dtype, s.shape) for s in manifest.tensors
        ]
        return last.id if same else None

    def _encode_all(
        self, export: CheckedExport, manifest: WeightManifest, delta: bool, parts: _Parts
    ) -> tuple[list[TensorSpec], list[Chunk]]:
        if not delta:
            self._snapshot = _allocate(manifest, self._snapshot_dir)
        specs: list[TensorSpec] = []
        chunks: list[Chunk] = []
        waiting: deque[tuple[str, int, int, Future[tuple[Encoding, bytes] | None]]] = deque()

        def take_one() -> None:
            name, start, length, future = waiting.popleft()
            encoded = future.result()
            if encoded is not None:
                chunks.append(parts.add(name, start, length, *encoded))

        with ThreadPoolExecutor(self._threads) as pool:
            for spec in manifest.tensors:
                data = export.bytes_of(spec)
                state: Any = xxhash.xxh3_128()
                for start in range(0, spec.num_bytes, self._chunk_bytes):
                    new = data[start : start + self._chunk_bytes].cpu().numpy()
                    state.update(new)
                    old = self._snapshot[spec.name][start : start + len(new)]
                    # The export may reuse its memory for the next tensor: the encoder works on the snapshot's copy.
                    waiting.append(
                        (spec.name, start, len(new), pool.submit(self._encode, old, new.copy(), spec, delta))
                    )
                    while len(waiting) > 2 * self._threads:
                        take_one()
                specs.append(msgspec.structs.replace(spec, digest=f"xxh3_128:{state.hexdigest()}"))
            while waiting:
                take_one()
        export.finish()
        return specs, chunks

    def _encode(self, old: Bytes, new: Bytes, spec: TensorSpec, delta: bool) -> tuple[Encoding, bytes] | None:
        encoded = encode(old if delta else None, new, DTYPE_BYTES[spec.dtype], self._level)
        if encoded is not None:
            old[:] = new
        return encoded

    def _collect(self) -> None:
        """Delete what no kept chain needs. The kept ones are the newest `keep_chains` full bases with their deltas."""
        newest = read_latest(self._store)
        keep: set[str] = set()
        bases = 0
        for publication_id in sorted(self._published(), reverse=True, key=self._age):
            if bases >= self._keep_chains:
                break
            try:
                links = chain(self._store, publication_id, None)
            except WeightUpdateError:
                # An older run's damaged or half-collected chain: of no use to anybody.
                continue
            bases += links[0].id not in keep
            keep |= {link.id for link in links}
        if newest is not None:
            keep.add(newest)
        doomed = [key for key in self._store.names() if "/" in key and key.split("/")[0] not in keep]
        # Indices first: a reader then sees a publication as missing, never as incomplete.
        for key in sorted(doomed, key=lambda key: not key.endswith("/index")):
            self._store.delete(key)

    def _published(self) -> list[str]:
        return [key.removesuffix("/index") for key in self._store.names() if key.endswith("/index")]

    def _age(self, publication_id: str) -> tuple[bool, str]:
        """Sorts the current chain above every other one, whatever the versions of an earlier run were."""
        return (self._last is not None and publication_id == self._last.id, publication_id)


class _Parts:
    """Writes chunks into parts of bounded size."""

    def __init__(self, store: Store, publication_id: str, part_bytes: int) -> None:
        self._store, self._id, self._part_bytes = store, publication_id, part_bytes
        # One growing buffer: payloads kept one by one would each pin the far larger memory they were packed in.
        self._open = bytearray()
        self._count = 0
        self.total = 0

    def add(self, name: str, start: int, length: int, encoding: Encoding, payload: bytes) -> Chunk:
        """Append a payload; says where it will lie."""
        chunk = Chunk(
            name=name,
            start=start,
            length=length,
            encoding=encoding,
            part=self._count,
            offset=len(self._open),
            num_bytes=len(payload),
            digest=digest(payload),
        )
        self._open += payload
        if len(self._open) >= self._part_bytes:
            self.close()
        return chunk

    def close(self) -> None:
        """Write the open part, if it holds anything."""
        if self._open:
            self._store.put(part_key(self._id, self._count), [self._open])
            self.total += len(self._open)
            self._count += 1
            self._open = bytearray()

    def discard(self) -> None:
        """Delete what was written: the publication failed."""
        self._store.delete(index_key(self._id))
        for part in range(self._count):
            self._store.delete(part_key(self._id, part))


def _allocate(manifest: WeightManifest, folder: Path | None) -> dict[str, Bytes]:
    """One flat buffer for all tensors, in memory or in an unlinked file that goes with the process."""
    total = manifest.num_bytes
    if folder is None or total == 0:
        flat: Bytes = np.empty(total, np.uint8)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".snapshot-{secrets.token_hex(6)}"
        flat = np.memmap(path, dtype=np.uint8, mode="w+", shape=(total,))
        path.unlink()
    return dict(_slices(manifest, flat))


def _slices(manifest: WeightManifest, flat: Bytes) -> Iterator[tuple[str, Bytes]]:
    start = 0
    for spec in manifest.tensors:
        yield spec.name, flat[start : start + spec.num_bytes]
        start += spec.num_bytes
