"""One update in a receiver's memory: which bytes of which tensor have come, verified as they arrive."""

from __future__ import annotations

import torch

from miles_contracts import TensorSpec, WeightManifest, WeightUpdateError
from miles_contracts.recycling import Recycler
from miles_sync.tensors import Bytes, copy_with_digest, digest_bytes, from_bytes


class Staging:
    """Tensors of an update that is under way. Deliveries may come in any order and more than once."""

    def __init__(self, update_id: str, manifest: WeightManifest, memory: Recycler) -> None:
        self.update_id = update_id
        self.manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._memory = memory
        self._data: dict[str, Bytes] = {}
        self._parts: dict[str, dict[int, int]] = {}
        self._whole: dict[str, str] = {}

    def put(self, spec: TensorSpec, data: Bytes, part_of: TensorSpec | None, start: int) -> None:
        """Copy a tensor, or the part of one that begins at byte `start`, and compare its digest with the spec's.

        Raises:
            WeightUpdateError: names the tensor and what is wrong with it; it then counts as not delivered.
        """
        whole = part_of if part_of is not None else spec
        expected = self._expected(whole, start, len(data))
        target = self._data.get(whole.name)
        if target is None:
            target = self._data[whole.name] = self._memory.take(expected.num_bytes)
        parts = self._parts.setdefault(whole.name, {})
        # A failed second delivery has spoilt the first one's bytes: they must not count as present.
        parts.pop(start, None)
        got = copy_with_digest(data, target[start : start + len(data)], digests=spec.digest is not None)
        if spec.digest is not None and got != spec.digest:
            raise WeightUpdateError(f"digest is {got}, the sender says {spec.digest}", tensor=whole.name)
        parts[start] = len(data)
        if part_of is not None and part_of.digest is not None:
            self._whole[whole.name] = part_of.digest

    def adopt(self, spec: TensorSpec, data: Bytes) -> None:
        """As `put` of a whole tensor, without a copy: `data` is ours from now on, and nobody else's.

        Raises:
            WeightUpdateError: as `put`.
        """
        self._expected(spec, 0, len(data))
        self._parts.pop(spec.name, None)
        if spec.digest is not None:
            got = digest_bytes(data)
            if got != spec.digest:
                raise WeightUpdateError(f"digest is {got}, the sender says {spec.digest}", tensor=spec.name)
        self._data[spec.name], self._parts[spec.name] = data, {0: len(data)}

    def _expected(self, whole: TensorSpec, start: int, length: int) -> TensorSpec:
        """The manifest's spec of a tensor of which `length` bytes from `start` on have come."""
        expected = self._specs.get(whole.name)
        if expected is None:
            raise WeightUpdateError("is not in the manifest", tensor=whole.name)
        if (whole.dtype, whole.shape) != (expected.dtype, expected.shape):
            raise WeightUpdateError(
                f"came as {whole.dtype}{list(whole.shape)}, the manifest says {expected.dtype}{list(expected.shape)}",
                tensor=whole.name,
            )
        if start < 0 or start + length > expected.num_bytes:
            raise WeightUpdateError(f"a part at byte {start} lies outside the tensor", tensor=whole.name)
        return expected

    def finish(self) -> dict[str, torch.Tensor]:
        """All tensors.

        Raises:
            WeightUpdateError: names the first tensor that is not complete.
        """
        for name, spec in self._specs.items():
            position = 0
            for start, length in sorted(self._parts.get(name, {}).items()):
                if start > position:
                    break
                position = max(position, start + length)
            if name not in self._parts or position < spec.num_bytes:
                raise WeightUpdateError(f"{position} of {spec.num_bytes} bytes came", tensor=name)
        for name, stated in self._whole.items():
            got = digest_bytes(self._data[name])
            if got != stated:
                raise WeightUpdateError(f"digest of the joined parts is {got}, not {stated}", tensor=name)
        return {name: from_bytes(self._data[name], spec) for name, spec in self._specs.items()}


class Receiver:
    """Holds the weights that are served, and at most one update in the making, invisible until it is committed.

    That is the model's size twice during an update, because nothing that serves may be written before everything is
    verified. It stays so between updates: the memory of the version before is what the next one is put into.
    """

    def __init__(self) -> None:
        self.memory = Recycler()
        self.version: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._staging: Staging | None = None
        self._committed: str | None = None
        self._closed: str | None = None

    def begin(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update; an unfinished other one is dropped. Beginning the same one again changes nothing.

        Raises:
            WeightUpdateError: this update was rolled back or committed; a late request must not reopen it.
        """
        if update_id in (self._closed, self._committed):
            raise WeightUpdateError(f"update {update_id} is over here")
        if self._staging is None or self._staging.update_id != update_id:
            self._staging = Staging(update_id, manifest, self.memory)

    def commit(self, update_id: str) -> None:
        """Swap the update in. Committing the same one again changes nothing.

        Raises:
            WeightUpdateError: a tensor is missing or incomplete; the old weights stay.
        """
        if update_id == self._committed:
            return
        staging = self.staging(update_id)
        self.tensors, self.version = staging.finish(), staging.manifest.version
        self._staging, self._committed = None, update_id

    def rollback(self, update_id: str) -> None:
        """Drop an uncommitted update for good; a committed one stays as it is."""
        self._closed = update_id
        if self._staging is not None and self._staging.update_id == update_id:
            self._staging = None

    def staging(self, update_id: str) -> Staging:
        """The open update.

        Raises:
            WeightUpdateError: it is not open here.
        """
        if self._staging is None or self._staging.update_id != update_id:
            raise WeightUpdateError(f"update {update_id} was not begun here")
        return self._staging
