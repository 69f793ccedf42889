"""A local safetensors checkpoint: where its tensors lie, and how a new one is written durably beside it."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from miles_contracts import TensorSpec, WeightManifest, WeightUpdateError
from miles_sync.disk.codec import Bytes
from miles_sync.disk.store import as_full_disk, write_durably

STATE = "miles_weights.json"
INDEX = "model.safetensors.index.json"

_TO_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint folder holds: written last, so a folder without it is not finished."""

    id: str
    manifest: WeightManifest


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    filename: str
    specs: tuple[TensorSpec, ...]


def plan_shards(manifest: WeightManifest, shard_bytes: int) -> list[ShardPlan]:
    """Tensors into files of at most `shard_bytes` (a larger tensor has a file of its own), in the manifest's order."""
    runs: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in manifest.tensors:
        if runs[-1] and size + spec.num_bytes > shard_bytes:
            runs.append([])
            size = 0
        runs[-1].append(spec)
        size += spec.num_bytes
    names = [f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors" for i in range(len(runs))]
    if len(runs) == 1:
        names = ["model.safetensors"]
    return [ShardPlan(filename=n, specs=tuple(r)) for n, r in zip(names, runs, strict=True)]


class ShardWriter:
    """Writes one safetensors file tensor by tensor."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._path = path
        self._file = path.open("xb")
        header, position = {"__metadata__": {"format": "pt"}}, 0
        entries: dict[str, object] = dict(header)
        for spec in specs:
            end = position + spec.num_bytes
            entries[spec.name] = {
                "dtype": _TO_SAFETENSORS[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._write(struct.pack("<Q", len(text)) + text)

    def add(self, data: Bytes) -> None:
        """The next tensor's bytes."""
        self._write(data.data)

    def close(self) -> None:
        """Finish the file, durably."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise as_full_disk(error, self._path) from error
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close without a guarantee; the folder is going to be removed."""
        self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise as_full_disk(error, self._path) from error


def write_index_files(folder: Path, shards: Sequence[ShardPlan], state: State) -> None:
    """The index that transformers reads (several files only) and, last, the state."""
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": state.manifest.num_bytes},
            "weight_map": {spec.name: shard.filename for shard in shards for spec in shard.specs},
        }
        write_durably(folder / INDEX, [json.dumps(index, indent=1).encode()])
    write_durably(folder / STATE, [msgspec.json.encode(state)])


def read_state(folder: Path) -> State | None:
    """What the folder holds, None when it is not a finished checkpoint."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


class ShardReader:
    """Tensors of one safetensors file, mapped.

    Raises:
        WeightUpdateError: the file is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise WeightUpdateError(f"{path.name} is not a safetensors file: {size} bytes")
            self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        (header,) = struct.unpack("<Q", self._map[:8])
        self._data: Bytes = np.frombuffer(self._map, np.uint8)[8 + header :]
        try:
            entries = json.loads(self._map[8 : 8 + header])
            self._places = {n: tuple(e["data_offsets"]) for n, e in entries.items() if n != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightUpdateError(f"{path.name} is not a safetensors file: its header is damaged") from error

    def view(self, spec: TensorSpec) -> Bytes:
        """One tensor's bytes, read-only, as they lie in the file.

        Raises:
            WeightUpdateError: the file does not hold it, or is too short.
        """
        if spec.name not in self._places:
            raise WeightUpdateError(f"{self._path.name} does not hold it", tensor=spec.name)
        start, end = self._places[spec.name]
        data = self._data[start:end]
        if len(data) != spec.num_bytes:
            raise WeightUpdateError(f"{self._path.name} is torn: {len(data)} of {spec.num_bytes}", tensor=spec.name)
        return data


class Checkpoint:
    """Tensors of a finished checkpoint folder."""

    def __init__(self, folder: Path, state: State, shard_bytes: int) -> None:
        self.folder, self.state = folder, state
        self.shards = plan_shards(state.manifest, shard_bytes)
        self.specs = {spec.name: spec for spec in state.manifest.tensors}
        self._where = {spec.name: shard.filename for shard in self.shards for spec in shard.specs}
        self._open: dict[str, ShardReader] = {}

    def view(self, name: str) -> Bytes:
        """One tensor's bytes, read-only.

        Raises:
            WeightUpdateError: the checkpoint's file is missing or damaged.
        """
        filename = self._where[name]
        if filename not in self._open:
            try:
                self._open[filename] = ShardReader(self.folder / filename)
            except OSError as error:
                raise WeightUpdateError(f"cannot read {filename}: {error.strerror}", tensor=name) from error
        return self._open[filename].view(self.specs[name])
