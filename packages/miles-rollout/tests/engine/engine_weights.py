"""A sender of weight updates for tests: canonical tensors of a folder in shared-memory style buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from miles_contracts import ShmBucket, ShmTensor, TensorSpec, WeightManifest, digest


@dataclass
class Update:
    """Tensors by canonical name, and the manifest that announces them (without digests)."""

    tensors: dict[str, torch.Tensor]
    manifest: WeightManifest


def canonical_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` wrote."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return dict(sorted(tensors.items()))


def spec_of(name: str, tensor: torch.Tensor, *, with_digest: bool = True) -> TensorSpec:
    """Spec of a contiguous tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(
        name=name, dtype=dtype, shape=tuple(tensor.shape), digest=digest(raw_bytes(tensor)) if with_digest else None
    )


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Contiguous little-endian bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def plan_update(folder: Path, version: int) -> Update:
    """An update to the weights of a folder."""
    tensors = canonical_tensors(folder)
    specs = tuple(spec_of(n, t, with_digest=False) for n, t in tensors.items())
    return Update(tensors, WeightManifest(version=version, tensors=specs))


def write_buckets(update: Update, directory: Path, update_id: str, *, bucket_bytes: int) -> Iterator[ShmBucket]:
    """One bucket after the other; a tensor that is too large travels in pieces."""
    index, used, content, entries = 0, 0, bytearray(), []

    def flush() -> ShmBucket:
        path = directory / f"bucket-{index}"
        path.write_bytes(content)
        return ShmBucket(
            path=str(path), num_bytes=len(content), tensors=tuple(entries), update_id=update_id, index=index
        )

    for name, tensor in update.tensors.items():
        spec, data = spec_of(name, tensor), raw_bytes(tensor)
        if len(data) > bucket_bytes:
            for start in range(0, len(data), bucket_bytes):
                piece = data[start : start + bucket_bytes]
                path = directory / f"piece-{name}-{start}"
                path.write_bytes(piece)
                part = TensorSpec(name=name, dtype="uint8", shape=(len(piece),), digest=digest(piece))
                yield ShmBucket(
                    path=str(path),
                    num_bytes=len(piece),
                    tensors=(ShmTensor(spec=part, offset=0),),
                    update_id=update_id,
                    index=index,
                    part_of=spec,
                    part_start=start,
                )
            continue
        if used + len(data) > bucket_bytes and entries:
            yield flush()
            index, used, content, entries = index + 1, 0, bytearray(), []
        offset = -(-used // 64) * 64
        content.extend(bytes(offset - used))
        content.extend(data)
        entries.append(ShmTensor(spec=spec, offset=offset))
        used = offset + len(data)
    if entries:
        yield flush()
