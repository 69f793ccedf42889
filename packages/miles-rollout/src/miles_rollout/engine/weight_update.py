"""A weight update is a transaction: begin, buckets, end. Nothing is visible before the commit.

    idle --begin--> open --bucket*--> open --commit--> idle (new weights serve)
                      |---rollback or any failed bucket, commit or load---> idle (old weights serve)

Buckets become staged tensors beside the serving ones, on a worker thread, while the engine goes on sampling; every
tensor's digest is computed here from what came and compared with the sender's. The commit swaps the staged tensors
in, on the model thread between two steps.

So an update needs the model's memory twice: nothing that serves may be written before everything is verified. On the
host the second half stays between updates, because touching new pages costs as much as copying: what version n - 1
used is where version n + 1 is staged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_contracts import (
    Arrival,
    InvalidFieldError,
    ShmBucket,
    ShmTensor,
    TensorSpec,
    WeightManifest,
    WeightUpdateError,
    digest,
)
from miles_rollout.engine.folder import WEIGHT_FILES, check_model_folder
from miles_rollout.engine.staging import Pieces, StagedWeights
from miles_rollout.engine.weight_layout import WeightLayout, dtype_name

Bytes = NDArray[np.uint8]


class WeightUpdates:
    """The transaction of one model. Methods but `commit` may run on any thread; those that change it take turns.

    `commit` must run on the model thread.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._layout: WeightLayout | None = None
        self._staged: StagedWeights | None = None
        self._manifest: WeightManifest | None = None
        self._pieces: dict[str, Pieces] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._adopted: set[str] = set()  # of what serves
        self._update_id: str | None = None
        self._committed: str | None = None

    @property
    def layout(self) -> WeightLayout:
        """Places of the canonical tensors, worked out at the first use."""
        with self._lock:
            if self._layout is None:
                self._layout = WeightLayout(self._model)
            return self._layout

    # -- transaction --------------------------------------------------------------------------------------------

    def begin(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update after checking that the manifest describes this model.

        Opening the same one again changes nothing. Another one that is still open is forgotten: whoever began it has
        died, or it would have been ended.
        """
        with self._lock:
            if self._update_id == update_id:
                return
            self._check(manifest.tensors)
            self._forget()
            self._staged = StagedWeights(self.layout, {t.name: t for t in manifest.tensors}, self._spare)
            self._manifest, self._update_id, self._pieces = manifest, update_id, {}

    def load_bucket(self, bucket: ShmBucket) -> None:
        """Copy and verify one shared-memory bucket. Any fault ends the update: the old weights serve on."""
        with self._lock:
            self._require_open(bucket.update_id)
            try:
                self._load_bucket(bucket)
            except (WeightUpdateError, InvalidFieldError, OSError) as error:
                self._forget()
                if isinstance(error, WeightUpdateError):
                    raise
                raise WeightUpdateError(f"bucket {bucket.index}: {error}") from error

    def require_open(self, update_id: str) -> None:
        """Raise WeightUpdateError unless this update is open; does not wait for what is being verified."""
        self._require_open(update_id)

    def load_arrivals(self, update_id: str, arrivals: Sequence[Arrival]) -> None:
        """Verify and copy tensors that a transfer brought. Any fault ends the update: the old weights serve on."""
        with self._lock:
            self._require_open(update_id)
            staged = self._staged
            assert staged is not None  # checked by _require_open
            try:
                for arrival in arrivals:
                    _require_expected(staged, arrival.part_of or arrival.spec)
                adopted = staged.adopts(arrivals)
                for arrival in arrivals:
                    self._take(staged, arrival, adopted)
            except (WeightUpdateError, InvalidFieldError) as error:
                self._forget()
                if isinstance(error, WeightUpdateError):
                    raise
                raise WeightUpdateError(str(error)) from error

    def commit(self, update_id: str) -> str:
        """Swap the staged weights in; the new weight version. Repeating a commit that succeeded is harmless."""
        with self._lock:
            if self._update_id is None and self._committed == update_id and self._manifest is not None:
                return str(self._manifest.version)
            self._require_open(update_id)
            staged, manifest = self._staged, self._manifest
            assert staged is not None  # an open update has both
            assert manifest is not None
            try:
                served = staged.swap()
            finally:
                self._forget()
            if self._committed is not None:
                # Nothing reads these any more. Those of the first commit are not ours: what a model was loaded into
                # may be shared or a mapped file. A device's allocator keeps freed memory itself.
                # Adopted memory goes back to where it came from when nobody sees it any more.
                self._spare = {n: t for n, t in served.items() if t.device.type == "cpu" and n not in self._adopted}
            self._adopted = staged.adopted
            self._manifest, self._committed = manifest, update_id
            return str(manifest.version)

    def rollback(self, update_id: str) -> None:
        """Forget an open update; harmless for an unknown one."""
        with self._lock:
            if self._update_id == update_id:
                self._forget()
            elif self._committed == update_id:
                raise WeightUpdateError(f"update {update_id!r} is committed; it cannot be rolled back")

    def _forget(self) -> None:
        self._staged = self._manifest = self._update_id = None
        self._pieces = {}

    def _require_open(self, update_id: str) -> None:
        current = self._update_id
        if current != update_id:
            now = f"update {current!r} is open" if current is not None else "no update is open"
            raise WeightUpdateError(f"update {update_id!r} is not open ({now}); begin it first")

    def _check(self, specs: tuple[TensorSpec, ...]) -> None:
        """The tensors that are to come must be exactly those of the model, tied ones once."""
        layout = self.layout
        seen: dict[str, str] = {}
        for spec in specs:
            canonical = layout.aliases.get(spec.name, spec.name)
            if canonical not in layout.places:
                raise WeightUpdateError("the model has no such tensor", tensor=spec.name)
            if canonical in seen:
                raise WeightUpdateError(f"it is tied to {seen[canonical]}; send it once", tensor=spec.name)
            seen[canonical] = spec.name
            place = layout.places[canonical]
            if place.shape != spec.shape:
                raise WeightUpdateError(
                    f"shape {list(spec.shape)}, the model's is {list(place.shape)}", tensor=spec.name
                )
            mine = layout.tensors[place.source].dtype
            theirs = getattr(torch, spec.dtype)
            if mine != theirs and not (mine.is_floating_point and theirs.is_floating_point):
                raise WeightUpdateError(f"dtype {spec.dtype}, the model's is {dtype_name(mine)}", tensor=spec.name)
        absent = sorted(layout.places.keys() - seen.keys())
        if absent:
            raise WeightUpdateError(f"{len(absent)} of the model's tensors are not in the update", tensor=absent[0])

    def _load_bucket(self, bucket: ShmBucket) -> None:
        staged = self._staged
        assert staged is not None  # checked by _require_open
        whole, start = bucket.part_of, bucket.part_start
        with open(bucket.path, "rb", buffering=0) as file:
            for tensor in bucket.tensors:
                spec = tensor.spec
                _require_expected(staged, whole or spec)
                if whole is not None:
                    room = self._pieces_of(staged, whole).room(start, spec.num_bytes)
                    _read(file, bucket, tensor, room)
                    _verify(room, spec)
                    self._piece_is_here(staged, whole, start, spec.num_bytes)
                    continue
                place = staged.memory(spec)
                data = np.empty(spec.num_bytes, np.uint8) if place is None else place
                _read(file, bucket, tensor, data)
                _verify(data, spec)
                if place is None:
                    _put(staged, spec, data)
                else:
                    staged.filled(spec.name)

    def _take(self, staged: StagedWeights, arrival: Arrival, adopt: bool) -> None:
        """Verify and stage a tensor or a piece of one. Its data is ours: nobody writes it meanwhile."""
        spec, whole, start = arrival.spec, arrival.part_of, arrival.part_start
        _verify(arrival.data, spec)
        if whole is not None:
            room = self._pieces_of(staged, whole).room(start, spec.num_bytes)
            room[:] = arrival.data
            self._piece_is_here(staged, whole, start, spec.num_bytes)
        elif adopt:
            staged.adopt(spec, arrival.data)
        else:
            _put(staged, spec, arrival.data)

    def _pieces_of(self, staged: StagedWeights, whole: TensorSpec) -> Pieces:
        if whole.name not in self._pieces:
            self._pieces[whole.name] = Pieces(whole, staged.memory(whole))
        return self._pieces[whole.name]

    def _piece_is_here(self, staged: StagedWeights, whole: TensorSpec, start: int, length: int) -> None:
        pieces = self._pieces[whole.name]
        if not pieces.filled(start, length):
            return
        del self._pieces[whole.name]
        if whole.digest is not None:
            _verify(pieces.data, whole)
        if pieces.in_place:
            staged.filled(whole.name)
        else:
            _put(staged, whole, pieces.data)

    # -- from disk ----------------------------------------------------------------------------------------------

    def stage_from_disk(self, folder: Path) -> StagedWeights:
        """Read a Hugging Face folder into staged tensors, complete and of the right shapes, or raise."""
        check_model_folder(folder)
        with self._lock:
            if self._update_id is not None:
                raise WeightUpdateError(f"update {self._update_id!r} is open; end it first (commit: false forgets it)")
            layout = self.layout
            staged: StagedWeights | None = None
            try:
                files = _weight_files(folder)
                specs = [spec for file in files for spec in file.specs()]
                names = {s.name for s in specs}
                # Some checkpoints hold tied tensors twice.
                specs = [s for s in specs if not (s.name in layout.aliases and layout.aliases[s.name] in names)]
                self._check(tuple(specs))
                staged = StagedWeights(layout, {s.name: s for s in specs}, self._spare)
                for file in files:
                    for name, tensor in file.tensors():
                        if name in staged.expected:
                            staged.put(name, tensor)
            except (OSError, ValueError, RuntimeError) as error:
                if isinstance(error, InvalidFieldError):
                    raise
                raise WeightUpdateError(f"{folder}: {error}") from error
            return staged

    # -- looking ------------------------------------------------------------------------------------------------

    def manifest(self, version: int) -> WeightManifest:
        """Names, dtypes, shapes and digests of the serving weights."""
        with self._lock:
            layout = self.layout
            specs = []
            for spec in layout.specs():
                raw = layout.read(spec.name).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                specs.append(TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape, digest=digest(raw)))
            return WeightManifest(version=version, tensors=tuple(specs))


def _read(file: FileIO, bucket: ShmBucket, tensor: ShmTensor, data: Bytes) -> None:
    """Read a tensor's bytes into our own memory: what is verified is what is kept, whatever the sender does next.

    Read, not mapped: a file that shrinks under a mapping would kill the process.
    """
    count = tensor.spec.num_bytes
    end = tensor.offset + count
    if not 0 <= tensor.offset <= end <= bucket.num_bytes:
        reason = f"bytes [{tensor.offset}, {end}) lie outside the bucket's {bucket.num_bytes}"
        raise WeightUpdateError(reason, tensor=tensor.spec.name)
    file.seek(tensor.offset)
    done, memory = 0, data.data
    while done < count:
        got = file.readinto(memory[done:])
        if not got:
            reason = f"{bucket.path} ends after {done} of its {count} bytes"
            raise WeightUpdateError(reason, tensor=tensor.spec.name)
        done += got


def _verify(data: Bytes, spec: TensorSpec) -> None:
    if spec.digest is None:
        raise WeightUpdateError("it comes without a digest", tensor=spec.name)
    actual = digest(data)
    if actual != spec.digest:
        raise WeightUpdateError(f"digest {actual} here, {spec.digest} at the sender", tensor=spec.name)


def _require_expected(staged: StagedWeights, spec: TensorSpec) -> None:
    want = staged.expected.get(spec.name)
    if want is None:
        raise WeightUpdateError("it is not in the manifest", tensor=spec.name)
    if (want.dtype, want.shape) != (spec.dtype, spec.shape):
        reason = f"{spec.dtype}{list(spec.shape)} in the bucket, {want.dtype}{list(want.shape)} in the manifest"
        raise WeightUpdateError(reason, tensor=spec.name)
    if want.digest is not None and want.digest != spec.digest and spec.digest is not None:
        raise WeightUpdateError(f"digest {spec.digest} in the bucket, {want.digest} in the manifest", tensor=spec.name)


def _put(staged: StagedWeights, spec: TensorSpec, data: Bytes) -> None:
    staged.put(spec.name, torch.from_numpy(data).view(getattr(torch, spec.dtype)).view(spec.shape))


_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class _SafetensorsFile:
    """One weight file of a folder, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def specs(self) -> list[TensorSpec]:
        """Names, dtypes and shapes, from the file's header."""
        from safetensors import SafetensorError, safe_open

        specs = []
        try:
            with safe_open(self._path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
                    specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(view.get_shape())))
        except SafetensorError as error:
            raise ValueError(f"{self._path.name}: {error}") from error
        return specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the file, one at a time."""
        from safetensors import safe_open

        with safe_open(self._path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


class _PickleFile(_SafetensorsFile):
    """Torch's own format, read without running any code in it."""

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for n, t in self.tensors()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from torch.load(self._path, map_location="cpu", weights_only=True, mmap=True).items()


def _weight_files(folder: Path) -> list[_SafetensorsFile]:
    """safetensors files, else torch's own format read without running code."""
    safe = sorted(folder.glob(WEIGHT_FILES[0]))
    return (
        [_SafetensorsFile(p) for p in safe] if safe else [_PickleFile(p) for p in sorted(folder.glob(WEIGHT_FILES[1]))]
    )
