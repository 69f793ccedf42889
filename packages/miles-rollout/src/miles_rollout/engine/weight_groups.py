"""Groups that weights come through: joined and left by SGLang's native calls, `torch.distributed` in every engine.

A collective cannot be taken back: who has entered it waits for the others. So it runs outside every lock, a member
that cannot take part leaves its group at once, and leaving makes the collective of all others fail instead of hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from miles_contracts import (
    Arrival,
    GroupRequest,
    InvalidFieldError,
    TensorSpec,
    WeightGroup,
    WeightGroupFactory,
    WeightUpdateError,
    update_group_prefix,
)
from miles_contracts.recycling import Recycler

SENDER_RANK = 0

TRANSFERS = "miles_transfers"
"""The load format of buckets whose large tensors come in broadcasts of their own."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class WeightGroups:
    """The groups that an engine is in, by name.

    Args:
        specs: what the engine holds, for factories that need to know.
        factories: more backends, by name; `gloo` and `nccl` are always there.
    """

    def __init__(self, specs: Sequence[TensorSpec], factories: Mapping[str, WeightGroupFactory]) -> None:
        self._specs = tuple(specs)
        torch_group: WeightGroupFactory = partial(TorchGroup, memory=Recycler())
        self._factories: dict[str, WeightGroupFactory] = {"gloo": torch_group, "nccl": torch_group, **factories}
        self._lock = threading.Lock()
        self._groups: dict[str, WeightGroup] = {}

    def join(self, request: GroupRequest) -> str:
        """Become a member; the address that senders reach this engine by. Joining again replaces the membership.

        Raises:
            InvalidFieldError: unknown backend.
            WeightUpdateError: not all ranks came in time.
        """
        factory = self._factories.get(request.backend)
        if factory is None:
            raise InvalidFieldError("backend", request.backend, f"use one of {', '.join(self._factories)}")
        self.leave(request.group_name)
        group = factory(request, self._specs)
        with self._lock:
            self._groups[request.group_name] = group
        return group.address

    def leave(self, name: str) -> bool:
        """Whether there was such a group."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def receive(self, bucket: Mapping[str, Any]) -> Sequence[Arrival]:
        """Take part in the transfer that a bucket announces; after a failure the engine is no longer a member.

        Raises:
            WeightUpdateError, InvalidFieldError: no such group, or the transfer failed.
        """
        name = bucket.get("group_name", "weight_update_group")
        with self._lock:
            group = self._groups.get(name)
        if group is None:
            known = ", ".join(self._groups) or "none"
            raise InvalidFieldError("group_name", name, f"join it first (/init_weights_update_group); joined: {known}")
        try:
            return group.receive(bucket)
        except (WeightUpdateError, InvalidFieldError):
            self.leave(name)
            raise

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)


class TorchGroup:
    """Receives broadcasts of a `torch.distributed` group; rank 0 sends.

    Args:
        request: the group.
        specs: what the engine holds; not needed here.
        memory: what broadcasts are received in. It is never written again while a tensor lies in it, so it may serve.
    """

    def __init__(self, request: GroupRequest, specs: Sequence[TensorSpec], memory: Recycler) -> None:
        self.address = ""
        self._name = request.group_name
        self._device = "cpu" if request.backend == "gloo" else "cuda"
        self._memory = memory
        timeout = timedelta(seconds=request.timeout_s)
        where = f"{request.master_address}:{request.master_port}"
        try:
            meeting = dist.TCPStore(  # type: ignore[attr-defined]
                request.master_address, request.master_port, timeout=timeout, wait_for_workers=False
            )
            prefix = update_group_prefix(request.group_name, self._device)
            store = dist.PrefixStore(prefix, meeting)  # type: ignore[attr-defined]
            if request.backend == "gloo":
                self._group: Any = dist.ProcessGroupGloo(store, request.rank_offset, request.world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, request.rank_offset, request.world_size, options)
        except RuntimeError as error:
            reason = f"the {request.world_size} ranks of group {self._name} did not meet at {where}: {error}"
            raise WeightUpdateError(reason) from error

    def receive(self, bucket: Mapping[str, Any]) -> Sequence[Arrival]:
        """One broadcast for all tensors behind each other (`flattened_bucket`), or one for each (no load format).

        Our own form, `miles_transfers`, states where tensors lie (`offsets`) and what each broadcast brings
        (`transfers`: first byte, length).
        """
        specs = _specs(bucket)
        offsets, transfers = _laid_out(bucket, specs)
        memory = self._memory.take(max(begin + length for begin, length in transfers))
        waits = [self._broadcast(memory[begin : begin + length]) for begin, length in transfers if length]
        for wait in waits:
            wait()
        whole, start = bucket.get("part_of"), bucket.get("part_start", 0)
        part_of = None if whole is None else msgspec.convert(whole, TensorSpec)
        return [
            Arrival(spec=spec, data=memory[at : at + spec.num_bytes], owned=True, part_of=part_of, part_start=start)
            for spec, at in zip(specs, offsets, strict=True)
        ]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            held, self._group = [self._group], None
            threading.Thread(target=_end, args=(held,), name="end-group", daemon=True).start()

    def _broadcast(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        """Start one; the result waits until it is in `memory`."""
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        tensor = torch.from_numpy(memory)
        on_device = tensor if self._device == "cpu" else torch.empty_like(tensor, device=self._device)
        try:
            work = self._group.broadcast([on_device], options)
        except (RuntimeError, AttributeError) as error:  # the latter: we have left it meanwhile
            raise self._failed(error) from error

        def arrived() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed(error) from error
            if on_device is not tensor:
                tensor.copy_(on_device)

        return arrived

    def _failed(self, error: Exception) -> WeightUpdateError:
        return WeightUpdateError(f"a broadcast in group {self._name} failed: {error}")


def _end(held: list[Any]) -> None:
    """Drop the last reference to a group: that ends its connections, and waits for a collective that hangs."""
    held.pop().abort()


def _specs(bucket: Mapping[str, Any]) -> list[TensorSpec]:
    names, dtypes, shapes = bucket.get("names"), bucket.get("dtypes"), bucket.get("shapes")
    digests = bucket.get("digests")
    columns = (names, dtypes, shapes, digests)
    lists = all(isinstance(column, list) for column in columns)
    if not lists or not names or len({len(column) for column in columns if column is not None}) != 1:
        remedy = "names, dtypes, shapes and digests are lists of one length, at least 1"
        raise InvalidFieldError("names", names, remedy)
    assert isinstance(dtypes, list)
    assert isinstance(shapes, list)
    assert isinstance(digests, list)
    return [
        TensorSpec(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), digest=found)
        for name, dtype, shape, found in zip(names, dtypes, shapes, digests, strict=True)
    ]


def _laid_out(bucket: Mapping[str, Any], specs: Sequence[TensorSpec]) -> tuple[list[int], list[tuple[int, int]]]:
    """First byte of each tensor in the bucket; first byte and length of each broadcast."""
    load_format = bucket.get("load_format")
    if load_format == TRANSFERS:
        try:
            offsets = msgspec.convert(bucket.get("offsets"), list[_Count])
            transfers = msgspec.convert(bucket.get("transfers"), list[tuple[_Count, _Count]])
        except msgspec.ValidationError as error:
            raise InvalidFieldError("transfers", bucket.get("transfers"), f"lists of whole numbers: {error}") from error
        if len(offsets) != len(specs) or not transfers:
            raise InvalidFieldError("offsets", offsets, f"give one for each of {len(specs)} tensors, and the transfers")
        for at, spec in zip(offsets, specs, strict=True):
            if not any(begin <= at and at + spec.num_bytes <= begin + length for begin, length in transfers):
                raise InvalidFieldError("offsets", at, f"no transfer brings the bytes of {spec.name}")
        return offsets, transfers
    if load_format not in (None, "flattened_bucket"):
        raise InvalidFieldError("load_format", load_format, f"use flattened_bucket or {TRANSFERS}, or leave it out")
    ends = np.cumsum([spec.num_bytes for spec in specs]).tolist()
    offsets = [end - spec.num_bytes for end, spec in zip(ends, specs, strict=True)]
    if load_format is None:
        return offsets, [(at, spec.num_bytes) for at, spec in zip(offsets, specs, strict=True)]
    return offsets, [(0, ends[-1])]
