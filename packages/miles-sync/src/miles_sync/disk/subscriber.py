"""The host's side of disk-delta: keeps a local checkpoint at the published version, crash-safely.

A new version is built in a folder of its own from the current one and the deltas in between; it is verified tensor by
tensor and becomes current by replacing one small file. The current folder is never written to, so an engine may be
reading it, and a crash at any moment leaves it as it was. Files in which nothing changed are linked, not copied.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec, WeightUpdateError, digest
from miles_sync.disk.checkpoint import (
    INDEX,
    STATE,
    Checkpoint,
    ShardPlan,
    ShardWriter,
    State,
    plan_shards,
    read_state,
    write_index_files,
)
from miles_sync.disk.codec import Bytes, DeltaDecodeError, decode
from miles_sync.disk.publication import Chunk, Publication, chain, read_latest, read_payload
from miles_sync.disk.store import Store, as_full_disk, sync_folder, write_durably

_BUILDING = ".building-"
_LINKS_UNSUPPORTED = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull did.

    Attributes:
        path: the checkpoint folder, loadable by transformers and engines.
        id, version: what it holds.
        applied: publications that were applied, oldest first; empty when the host had it already.
        num_bytes: compressed bytes read from the store.
        healed: why the local base could not be used, "" when it could.
    """

    path: Path
    id: str
    version: int
    applied: tuple[str, ...]
    num_bytes: int
    healed: str = ""


class DeltaSubscriber:
    """One host's checkpoint under `folder`. Several processes may share it; they take turns.

    Args:
        store: where versions are published.
        folder: local and ours alone; the current checkpoint and the one before are kept in it.
        companions: files besides weights (configuration, tokenizer ...) that every checkpoint folder gets.
        shard_bytes: size of a weight file.

    Raises:
        InvalidFieldError: a size below 1.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        companions: Sequence[Path] = (),
        shard_bytes: int = 4 * 1024**3,
    ) -> None:
        if shard_bytes < 1:
            raise InvalidFieldError("shard_bytes", shard_bytes, "use at least 1")
        folder.mkdir(parents=True, exist_ok=True)
        self._store, self._folder, self._shard_bytes = store, folder, shard_bytes
        self._companions = tuple(companions)

    def current(self) -> Checkpoint | None:
        """The newest finished checkpoint of this host."""
        try:
            name = (self._folder / "current").read_text()
        except FileNotFoundError:
            return None
        state = read_state(self._folder / name)
        return Checkpoint(self._folder / name, state, self._shard_bytes) if state is not None else None

    def pull(self, publication_id: str | None = None) -> PullReport:
        """Bring the checkpoint to a publication (None: the newest) and verify every tensor of it.

        Missed versions are caught up with; a damaged local base is replaced through the last full base.

        Raises:
            WeightUpdateError: nothing is published, or a file of the store is missing, torn, reordered or damaged;
                names file and tensor. The current checkpoint stays.
        """
        with self._locked():
            target = publication_id if publication_id is not None else read_latest(self._store)
            if target is None:
                raise WeightUpdateError("nothing is published yet")
            current = self.current()
            if current is not None and current.state.id == target:
                return _report(current, (), 0)
            have = current.state.id if current is not None else None
            links = chain(self._store, target, have)
            if links[0].base is None:
                return self._build(links, None)
            assert current is not None
            try:
                return self._build(links, current)
            except LocalBaseError as error:
                healed = self._build(chain(self._store, target, None), None)
                return msgspec.structs.replace(healed, healed=str(error))

    def _build(self, links: Sequence[Publication], base: Checkpoint | None) -> PullReport:
        final = links[-1]
        state = State(id=final.id, manifest=final.manifest)
        building = self._folder / f"{_BUILDING}{final.id}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            changes = _Changes(self._store, links)
            shards = plan_shards(final.manifest, self._shard_bytes)
            for shard in shards:
                if base is None or not _link_unchanged(base, building, shard):
                    _write_shard(building / shard.filename, shard, base, changes)
            self._copy_companions(building)
            write_index_files(building, shards, state)
            sync_folder(building)
            checkpoint = self._publish_locally(building, state)
        except OSError as error:
            shutil.rmtree(building, ignore_errors=True)
            raise as_full_disk(error, building) from error
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return _report(checkpoint, tuple(link.id for link in links), changes.num_bytes)

    def _copy_companions(self, building: Path) -> None:
        for companion in self._companions:
            if companion.name in (STATE, INDEX) or companion.suffix == ".safetensors":
                raise InvalidFieldError("companions", companion.name, "give files that are not weights")
            shutil.copyfile(companion, building / companion.name)

    def _publish_locally(self, building: Path, state: State) -> Checkpoint:
        folder = self._folder / state.id
        # A leftover of the same id is unfinished or not current: it cannot be in use.
        shutil.rmtree(folder, ignore_errors=True)
        before = self.current()
        building.replace(folder)
        sync_folder(self._folder)
        write_durably(self._folder / "current", [state.id.encode()])
        self._collect({state.id, before.state.id if before is not None else state.id})
        return Checkpoint(folder, state, self._shard_bytes)

    def _collect(self, keep: set[str]) -> None:
        for path in self._folder.iterdir():
            if path.is_dir() and path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class LocalBaseError(WeightUpdateError):
    """The local checkpoint is not what it says it is."""


class _Changes:
    """The chunks of a chain of publications, by tensor, oldest first."""

    def __init__(self, store: Store, links: Sequence[Publication]) -> None:
        self._store = store
        self._specs: Mapping[str, TensorSpec] = links[-1].specs
        self._by_name: dict[str, list[tuple[str, Chunk]]] = {}
        self._starts_full = links[0].base is None
        self.num_bytes = 0
        for link in links:
            for chunk in link.chunks:
                self._by_name.setdefault(chunk.name, []).append((link.id, chunk))

    def apply(self, spec: TensorSpec, data: Bytes) -> None:
        """Turn the base's bytes into the final ones, in place, and verify them.

        Raises:
            WeightUpdateError: a payload is damaged, or the result is not what was published.
        """
        for publication_id, chunk in self._by_name.get(spec.name, ()):
            payload = read_payload(self._store, publication_id, chunk)
            self.num_bytes += len(payload)
            if chunk.start < 0 or chunk.start + chunk.length > len(data):
                raise WeightUpdateError(f"a chunk of {publication_id} lies outside", tensor=spec.name)
            try:
                part = data[chunk.start : chunk.start + chunk.length]
                decode(chunk.encoding, payload, part, DTYPE_BYTES[spec.dtype])
            except (DeltaDecodeError, InvalidFieldError) as error:
                raise WeightUpdateError(f"a chunk of {publication_id} {error}", tensor=spec.name) from error
        got = digest(data.data)
        if got != spec.digest:
            reason = f"is {got} after patching, {spec.digest} was published"
            kind = WeightUpdateError if self._starts_full else LocalBaseError
            raise kind(reason, tensor=spec.name)


def _write_shard(path: Path, shard: ShardPlan, base: Checkpoint | None, changes: _Changes) -> None:
    writer = ShardWriter(path, shard.specs)
    try:
        for spec in shard.specs:
            data = np.zeros(spec.num_bytes, np.uint8) if base is None else _base_view(base, spec.name).copy()
            changes.apply(spec, data)
            writer.add(data)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _base_view(base: Checkpoint, name: str) -> Bytes:
    try:
        return base.view(name)
    except WeightUpdateError as error:
        raise LocalBaseError(error.reason, tensor=error.tensor) from error


def _link_unchanged(base: Checkpoint, building: Path, shard: ShardPlan) -> bool:
    """Link the base's file when it holds exactly these tensors, after comparing their digests."""
    same = next((s for s in base.shards if s.filename == shard.filename), None)
    if same is None or same.specs != shard.specs:
        return False
    for spec in shard.specs:
        if digest(_base_view(base, spec.name).data) != spec.digest:
            raise LocalBaseError("is not what its digest says", tensor=spec.name)
    try:
        os.link(base.folder / shard.filename, building / shard.filename)
    except OSError as error:
        if error.errno in (*_LINKS_UNSUPPORTED, errno.ENOENT):
            return False
        raise
    return True


def _report(checkpoint: Checkpoint, applied: tuple[str, ...], num_bytes: int) -> PullReport:
    state = checkpoint.state
    return PullReport(
        path=checkpoint.folder, id=state.id, version=state.manifest.version, applied=applied, num_bytes=num_bytes
    )
