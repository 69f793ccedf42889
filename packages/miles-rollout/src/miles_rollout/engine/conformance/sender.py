"""Sends weights as the promises need it: over a process group, as shared-memory files, as SGLang's pickles.

Needs torch and safetensors, which only the checks of weight updates do.
"""

from __future__ import annotations

import base64
import io
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file

from miles_contracts import (
    ShmBucket,
    ShmTensor,
    TensorSpec,
    WeightManifest,
    digest,
    update_group_prefix,
)

Tensors = Mapping[str, torch.Tensor]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Contiguous tensors of a Hugging Face folder by canonical name, in the order of the names."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: tensors[name].contiguous() for name in sorted(tensors)}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Metadata and digest of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), digest=digest(_bytes(tensor)))


def manifest_of(tensors: Tensors, version: int) -> WeightManifest:
    """What an update to these tensors announces."""
    return WeightManifest(version=version, tensors=tuple(spec_of(n, t) for n, t in tensors.items()))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


class GroupSender:
    """Rank 0 of a gloo group of two: the sender and one engine rank."""

    def __init__(self) -> None:
        self.name = f"conformance-{secrets.token_hex(6)}"
        self._timeout = timedelta(seconds=30)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self.port: int = self._store.port

    def meet(self) -> None:
        """Wait for the engine's rank; blocks."""
        store = dist.PrefixStore(update_group_prefix(self.name), self._store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(store, 0, 2, self._timeout)

    def send(self, tensors: Tensors) -> None:
        """One broadcast for each tensor, in order; blocks until the engine has taken part."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors.values():
            self._group.broadcast([tensor], options).wait()


@contextmanager
def shared_bucket(tensors: Tensors, update_id: str) -> Iterator[ShmBucket]:
    """All tensors in one file of shared memory, described for the embedded engine."""
    placed: list[ShmTensor] = []
    content = bytearray()
    for name, tensor in tensors.items():
        content.extend(bytes(-len(content) % 64))
        placed.append(ShmTensor(spec=spec_of(name, tensor), offset=len(content)))
        content.extend(_bytes(tensor))
    path = Path("/dev/shm") / f"miles-{update_id}"
    path.write_bytes(content)
    try:
        yield ShmBucket(path=str(path), num_bytes=len(content), tensors=tuple(placed), update_id=update_id, index=0)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def pickled(tensors: Tensors) -> Iterator[str]:
    """The tensors as SGLang takes them: base64 of a pickle that names shared memory, valid while the block runs."""
    sharing: Any = torch.multiprocessing
    before = sharing.get_sharing_strategy()
    # A file descriptor could not be handed to a process that is not a child.
    sharing.set_sharing_strategy("file_system")
    kept = [(name, tensor.clone()) for name, tensor in tensors.items()]
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(kept)
        yield base64.b64encode(buffer.getvalue()).decode()
    finally:
        sharing.set_sharing_strategy(before)
