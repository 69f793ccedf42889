"""Memory that another process of this host opens by a handle, in the form that SGLang takes.

    host memory    torch's shared memory by name: a segment of ours with torch's header in front, opened, not copied
    device memory  a CUDA IPC handle, with the device named by its UUID

Both are what torch itself makes of a tensor that is sent to another process, so a receiver needs nothing but torch.
A handle is a pickle that the sender makes of its own tensors. Nothing in Miles ever reads one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions
from torch.utils.dlpack import from_dlpack

from miles_contracts import ShmTensor, WeightUpdateError
from miles_sync.named_memory import first_line
from miles_sync.tensors import torch_dtype

_DEVICE = 6
"""Position of the device among what `rebuild_cuda_tensor` takes."""


def alias(storage: torch.UntypedStorage, start: int, end: int) -> torch.Tensor:
    """uint8 [end - start]: these bytes of a storage, in a storage of their own that keeps the first one alive.

    Passing memory on wraps its storage, once for every handle and for as long as the storage lives. That of parameters
    would gather such wraps with every update.
    """
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return from_dlpack(whole)[start:end]


def pack(memory: torch.Tensor, tensors: Sequence[ShmTensor], origin: int = 0) -> bytes:
    """A handle of `memory`, and which tensor lies where in it: SGLang's `flattened_bucket`.

    To be called once for every process that opens it: device memory counts its readers.

    Args:
        memory: uint8, flat.
        tensors: with offsets from `origin`.
        origin: offset of the first byte of `memory`.

    Raises:
        WeightUpdateError: torch cannot pass this memory on.
    """
    metadata = []
    for tensor in tensors:
        spec, start = tensor.spec, tensor.offset - origin
        metadata.append(
            SimpleNamespace(
                name=spec.name,
                shape=spec.shape,
                dtype=torch_dtype(spec.dtype),
                start_idx=start,
                end_idx=start + spec.num_bytes,
                numel=spec.num_bytes,
            )
        )
    packed = io.BytesIO()
    try:
        with _by_name():
            _Pickler(packed).dump({"flattened_tensor": memory, "metadata": metadata})
    except RuntimeError as error:
        raise WeightUpdateError(f"torch gives no handle of memory on {memory.device}: {first_line(error)}") from error
    return packed.getvalue()


def by_device_uuid(reduced: Any, uuid_of: Callable[[int], str]) -> Any:
    """What torch makes of a CUDA tensor, with the device's UUID for its number: numbers differ between processes.

    Raises:
        WeightUpdateError: this torch describes device memory in another way.
    """
    function, arguments = reduced[0], reduced[1]
    if function is not reductions.rebuild_cuda_tensor or not isinstance(arguments[_DEVICE], int):
        raise WeightUpdateError(f"torch {torch.__version__} describes device memory in an unknown way")
    return function, (*arguments[:_DEVICE], uuid_of(arguments[_DEVICE]), *arguments[_DEVICE + 1 :])


class _Pickler(ForkingPickler):
    """Torch's own, but for the name of the device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return by_device_uuid(reductions.reduce_tensor(obj), _uuid)  # type: ignore[no-untyped-call]
        return NotImplemented


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _by_name() -> Iterator[None]:
    """Host memory is passed on by name: its other form, a descriptor, can be taken by relatives only."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
