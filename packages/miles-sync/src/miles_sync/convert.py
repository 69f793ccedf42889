"""Between canonical tensors and what ranks store, and the layout of live sharded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from miles_contracts import InvalidFieldError, TensorSpec
from miles_sync.layout import Fragment, Index, Layout, RankLayout
from miles_sync.tensors import dtype_name, torch_dtype

Tensors = Mapping[str, torch.Tensor]


def scatter(layout: Layout, rank: int, canonical: Tensors) -> dict[str, torch.Tensor]:
    """What `rank` stores of these canonical tensors; padding is zero."""
    kept = layout.ranks[rank]
    out = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in kept.stored}
    for fragment in kept.fragments:
        box_of_stored(out[fragment.stored], fragment).copy_(box_of_canonical(canonical[fragment.name], fragment))
    return out


def gather(layout: Layout, stored: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """The canonical tensors, from what every rank stores (rank by rank).

    Raises:
        InvalidFieldError: the ranks together do not hold every element of a tensor.
    """
    out = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in layout.tensors}
    boxes: dict[str, set[tuple[Index, Index]]] = {spec.name: set() for spec in layout.tensors}
    for rank, tensors in zip(layout.ranks, stored, strict=True):
        for fragment in rank.fragments:
            box_of_canonical(out[fragment.name], fragment).copy_(box_of_stored(tensors[fragment.stored], fragment))
            boxes[fragment.name].add((fragment.start, fragment.shape))
    for spec in layout.tensors:
        covered = sum(Fragment(name="", start=s, shape=n, stored="", at=s).num_elements for s, n in boxes[spec.name])
        if covered != spec.num_elements:
            raise InvalidFieldError("layout", spec.name, f"its ranks hold {covered} of {spec.num_elements} elements")
    return out


def box_of_stored(stored: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    """View of a stored tensor in the shape of the fragment's box."""
    extra = len(fragment.at) - len(fragment.shape)
    for index in fragment.at[:extra]:
        stored = stored[index]
    for dim, (at, size) in enumerate(zip(fragment.at[extra:], fragment.shape, strict=True)):
        stored = stored.narrow(dim, at, size)
    return stored


def box_of_canonical(canonical: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    """View of the fragment's box of a canonical tensor."""
    for dim, (start, size) in enumerate(zip(fragment.start, fragment.shape, strict=True)):
        canonical = canonical.narrow(dim, start, size)
    return canonical


def local_layout(tensors: Tensors, tied: Mapping[str, str] | None = None) -> tuple[list[TensorSpec], RankLayout]:
    """Canonical specs and this rank's layout of live tensors; a `DTensor` (FSDP2) counts with its local shard.

    Args:
        tensors: canonical names, for example of `model.state_dict()`.
        tied: alias -> canonical name; an alias is left out.
    """
    from torch.distributed.tensor import DTensor

    specs: list[TensorSpec] = []
    stored: list[TensorSpec] = []
    fragments: list[Fragment] = []
    for name, tensor in sorted(tensors.items()):
        if tied and name in tied:
            if tied[name] not in tensors:
                raise InvalidFieldError("tied", tied[name], f"the tensor that {name} is tied to must be there")
            continue
        dtype = dtype_name(tensor.dtype)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)))
        if isinstance(tensor, DTensor):
            shape, start = _local_box(tensor)
        else:
            shape, start = tuple(tensor.shape), (0,) * tensor.dim()
        stored.append(TensorSpec(name=name, dtype=dtype, shape=shape))
        if all(shape):
            fragments.append(Fragment(name=name, start=start, shape=shape, stored=name, at=(0,) * len(shape)))
    return specs, RankLayout(stored=tuple(stored), fragments=tuple(fragments))


def local_tensors(tensors: Tensors, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The local storage behind `local_layout`'s stored tensors."""
    from torch.distributed.tensor import DTensor

    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items() if n in set(names)}


def _local_box(tensor: torch.Tensor) -> tuple[Index, Index]:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise InvalidFieldError("tensors", str(tensor.placements), "reduce partial tensors before they are exported")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)
