"""Weights under canonical names: exactly the tensors `save_pretrained` would write, streamed.

transformers keeps some weights in another form than its checkpoints (all experts of a layer are one tensor,
for example). The plan of the way back is made once from metadata (meta tensors); the stream then converts
one group of tensors at a time, mostly into views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from miles_contracts import TensorSpec, WeightManifest


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Persistent parameters and buffers by in-memory name, detached, tied ones once.

    Of tied tensors the one is kept that `save_pretrained` keeps: the source the others are tied to.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: dict[tuple[int, tuple[int, ...], int], str] = {}
    out: dict[str, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name in sorted(state, key=lambda n: (n in tied, n)):
        tensor = state[name]
        key = (id(tensor), tuple(tensor.shape), tensor.storage_offset())
        if key in seen:
            continue
        seen[key] = name
        out[name] = tensor.detach()
    return out


def canonical(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert in-memory tensors to those of a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


class Exporter:
    """Exports one model again and again; what depends on structure only is worked out once.

    Args:
        model: a transformers model whose tensors keep their names and shapes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        meta = {name: torch.empty_like(t, device="meta") for name, t in live_tensors(model).items()}
        whole = canonical(model, meta)
        self.specs = tuple(
            TensorSpec(name=name, dtype=str(whole[name].dtype).removeprefix("torch."), shape=tuple(whole[name].shape))
            for name in sorted(whole)
        )
        self.groups = _independent_groups(model, meta, whole)

    def manifest(self, version: int) -> WeightManifest:
        """Names, dtypes and shapes of what `stream` yields, without touching data."""
        return WeightManifest(version=version, tensors=self.specs)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """(name, contiguous detached tensor) sorted by name; a group's conversion is dropped after its last tensor."""
        tensors = live_tensors(self.model)
        owner = {name: index for index, (_, names) in enumerate(self.groups) for name in names}
        ready: dict[int, dict[str, Tensor]] = {}
        for name in sorted(owner):
            index = owner[name]
            if index not in ready:
                ready[index] = canonical(self.model, {source: tensors[source] for source in self.groups[index][0]})
            yield name, ready[index].pop(name).contiguous()
            if not ready[index]:
                del ready[index]


def _independent_groups(
    model: nn.Module, meta: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(in-memory names, canonical names) of tensors that convert independently of all others.

    A tensor that converts alone to something else than it does among all others needs its neighbours; then all
    tensors of its module convert together, and if that is not enough either, everything does.
    """
    for partition in (_one_each, _by_module):
        produced = [(sources, canonical(model, {s: meta[s] for s in sources})) for sources in partition(meta)]
        shapes = [(name, t.shape) for _, made in produced for name, t in made.items()]
        if sorted(shapes) == sorted((name, t.shape) for name, t in whole.items()):
            return [(sources, tuple(made)) for sources, made in produced]
    return [(tuple(meta), tuple(whole))]


def _one_each(names: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    return [(name,) for name in names]


def _by_module(names: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return [tuple(group) for group in modules.values()]
