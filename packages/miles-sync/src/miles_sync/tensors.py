"""Tensors as bytes: views, dtype names, and a copy that digests what it copies while it is in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec

Bytes = NDArray[np.uint8]

_CHUNK = 512 * 1024
"""Bytes copied before they are digested: small enough to be still in the second-level cache."""

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPE_BYTES if hasattr(torch, name)}


def dtype_name(dtype: torch.dtype) -> str:
    """The contract's name of a torch dtype.

    Raises:
        InvalidFieldError: the dtype does not travel.
    """
    if dtype not in _NAMES:
        raise InvalidFieldError("dtype", str(dtype), f"use one of {', '.join(_NAMES.values())}")
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with the contract's name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Name, dtype and shape of a tensor, without a digest."""
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [num_bytes] of the contiguous tensor, on its device; a view unless the tensor is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, and then has no bytes to view.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def from_bytes(data: Bytes, spec: TensorSpec) -> torch.Tensor:
    """The tensor of this spec over `data` (uint8 [spec.num_bytes], writable); shares its memory."""
    if not len(data):
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    return torch.from_numpy(data).view(torch_dtype(spec.dtype)).reshape(spec.shape)


def fetch_with_digest(source: torch.Tensor, target: Bytes, *, digests: bool = True) -> str | None:
    """Copy flat uint8 `source` (any device) into host bytes of the same length; the digest of what was copied."""
    if source.device.type == "cpu":
        return copy_with_digest(source.numpy(), target, digests=digests)
    torch.from_numpy(target).copy_(source)
    return digest_bytes(target) if digests else None


def place_with_digest(source: torch.Tensor, target: torch.Tensor, *, digests: bool = True) -> str | None:
    """Copy flat uint8 `source` (any device) into `target` of the same length (any device); the digest of the bytes."""
    if target.device.type == "cpu":
        return fetch_with_digest(source, target.numpy(), digests=digests)
    target.copy_(source)
    return digest_bytes(source.cpu().numpy()) if digests else None


def copy_with_digest(source: Bytes, target: Bytes, *, digests: bool = True) -> str | None:
    """Copy bytes; the digest of what was copied, None when not asked for.

    One pass over memory: a chunk is digested while the cache still has it.
    """
    if not digests or len(source) <= _CHUNK:
        target[:] = source
        return digest_bytes(target) if digests else None
    state: Any = xxhash.xxh3_128()
    for start in range(0, len(source), _CHUNK):
        piece = target[start : start + _CHUNK]
        piece[:] = source[start : start + _CHUNK]
        state.update(piece)
    return f"xxh3_128:{state.hexdigest()}"


def digest_bytes(data: Bytes) -> str:
    """`xxh3_128:<hex>` of contiguous bytes."""
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data.data)}"
