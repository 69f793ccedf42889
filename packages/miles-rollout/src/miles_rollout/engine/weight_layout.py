"""Where each canonical Hugging Face tensor lives inside the model in memory.

Transformers keeps some tensors in another form than checkpoints do (for example all experts of a layer in one).
The reverse conversion of `save_pretrained` is run once on index tensors; that shows, whatever the conversion
does, which element of which parameter every element of a canonical tensor is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch

from miles_contracts import InvalidFieldError, TensorSpec


@dataclass(frozen=True, slots=True)
class Place:
    """A canonical tensor as part of the parameter `source`.

    Attributes:
        strides, offset: of the view, in elements, when it is one; then `index` is None.
        index: flat element numbers otherwise.
    """

    source: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    offset: int = 0
    index: torch.Tensor | None = None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The canonical tensor (a view when possible) inside a contiguous `tensor` shaped like the source."""
        if self.index is None:
            return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)
        return tensor.view(-1)[self.index].view(self.shape)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a canonical tensor into its place, converting the dtype."""
        if self.index is None:
            self.read(tensor).copy_(value)
        else:
            tensor.view(-1)[self.index] = value.reshape(-1).to(tensor.dtype)


class WeightLayout:
    """Canonical names of a model's parameters and persistent buffers.

    Attributes:
        tensors: the model's own tensors by the name they have in memory; tied ones once.
        places: canonical name -> place.
        aliases: names of tied tensors -> the canonical name under which they are sent.
    """

    def __init__(self, model: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        by_identity: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            first = by_identity.setdefault(id(tensor), name)
            if first != name:
                self.aliases[name] = first
            else:
                self.tensors[name] = tensor
        self.places = _places(model, self.tensors)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Canonical names, dtypes and shapes, sorted by name."""
        return tuple(
            TensorSpec(name=name, dtype=dtype_name(self.tensors[place.source].dtype), shape=place.shape)
            for name, place in sorted(self.places.items())
        )

    def place(self, name: str) -> Place:
        """The place of a canonical (or tied) name.

        Raises:
            InvalidFieldError: the model has no such tensor.
        """
        place = self.places.get(self.aliases.get(name, name))
        if place is None:
            raise InvalidFieldError("name", name, "the model has no tensor of this canonical name")
        return place

    def read(self, name: str) -> torch.Tensor:
        """The tensor of a canonical name as it serves now."""
        place = self.place(name)
        return place.read(self.tensors[place.source].data)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _places(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Place]:
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: torch.empty(t.shape, device="meta") for name, t in tensors.items()}
    names = {id(t): name for name, t in shapes.items()}
    places: dict[str, Place] = {}
    kept: set[str] = set()
    for canonical, tensor in revert_weight_conversion(model, dict(shapes)).items():
        source = names.get(id(tensor))
        if source is not None:
            shape = tuple(tensor.shape)
            places[canonical] = Place(source, shape, _contiguous_strides(shape), 0)
            kept.add(source)
    converted = [name for name in tensors if name not in kept]
    if converted:
        places.update(_probe(model, {name: tensors[name].shape for name in converted}))
    covered: dict[str, int] = {}
    for place in places.values():
        covered[place.source] = covered.get(place.source, 0) + math.prod(place.shape)
    for name, tensor in tensors.items():
        if covered.get(name, 0) != tensor.numel():
            raise InvalidFieldError("model", name, "transformers cannot write it in checkpoint form without loss")
    return places


def _probe(model: Any, shapes: dict[str, torch.Size]) -> dict[str, Place]:
    """Run the reverse conversion on numbered elements and read off where each came from."""
    from transformers.core_model_loading import revert_weight_conversion

    starts: list[int] = []
    sources = list(shapes)
    numbered: dict[str, torch.Tensor] = {}
    total = 0
    for name in sources:
        count = math.prod(shapes[name])
        starts.append(total)
        numbered[name] = torch.arange(total, total + count, dtype=torch.int64).view(shapes[name])
        total += count
    places = {}
    for canonical, index in revert_weight_conversion(model, numbered).items():
        which = bisect_right(starts, int(index.reshape(-1)[0])) - 1
        places[canonical] = _describe(sources[which], index - starts[which])
    return places


def _describe(source: str, index: torch.Tensor) -> Place:
    shape = tuple(index.shape)
    offset = int(index.reshape(-1)[0])
    strides = []
    for dim, size in enumerate(shape):
        strides.append(int(index.select(dim, 1).reshape(-1)[0]) - offset if size > 1 else 0)
    regular = torch.full((), offset, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64) * stride
        regular = regular + steps.view([-1 if d == dim else 1 for d in range(len(shape))])
    if min(strides, default=0) >= 0 and torch.equal(regular.expand(shape), index):
        return Place(source, shape, tuple(strides), offset)
    return Place(source, shape, index=index.reshape(-1).clone())


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
