"""Records which experts each fed token was sent to, layer by layer, found by the structure of the model.

A mixture-of-experts layer is a module called `experts` whose forward pass takes an integer tensor [tokens, top_k]:
the chosen experts. Nothing depends on the model's name.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_contracts import narrowest_dtype
from miles_rollout.engine.scheduler import Chunk


class RouteRecorder:
    """Hooks on the expert modules of a model.

    Attributes:
        layers: mixture layers, in the order of the model's modules.
        num_experts: experts per layer (the largest, should layers differ).
        top_k: experts per token, known after the first forward pass.
    """

    def __init__(self, model: torch.nn.Module, num_experts: int, modules: list[torch.nn.Module]) -> None:
        self.layers = len(modules)
        self.num_experts = num_experts
        self.top_k = 0
        self._dtype = narrowest_dtype(num_experts)
        self._seen: list[torch.Tensor | None] = [None] * len(modules)
        self._per_token = 0.0
        for position, module in enumerate(modules):
            module.register_forward_pre_hook(self._hook(position), with_kwargs=True)

    @classmethod
    def attach(cls, model: torch.nn.Module) -> RouteRecorder | None:
        """A recorder on `model`; None when it has no mixture layers."""
        modules = [m for name, m in model.named_modules() if name.rpartition(".")[2] == "experts" and _count(m)]
        return cls(model, max(_count(m) for m in modules), modules) if modules else None

    def _hook(self, position: int) -> Any:
        def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point():
                    self._seen[position] = value
                    return

        return record

    def distribute(self, chunks: list[Chunk]) -> None:
        """Give every sequence the rows of the tokens it fed in the pass that just ended, and its share of the time."""
        began = time.perf_counter()
        seen = [ids for ids in self._seen if ids is not None]
        if len(seen) != self.layers:
            missing = [i for i, ids in enumerate(self._seen) if ids is None]
            raise RuntimeError(f"mixture layers {missing} chose no experts in this forward pass")
        rows: NDArray[Any] = torch.stack(seen, dim=1).cpu().numpy().astype(self._dtype)
        self.top_k = rows.shape[2]
        at, per_token = 0, self._per_token
        for chunk in chunks:
            sequence, count = chunk.sequence, chunk.count
            sequence.record_routes(chunk.start, rows[at : at + count])
            sequence.capture_s += per_token * count
            at += count
        # what this pass took is known too late for its own tokens; the next one's share it
        self._per_token = (time.perf_counter() - began) / max(at, 1)
        self._seen = [None] * self.layers


def _count(module: torch.nn.Module) -> int:
    """Experts in a module called `experts`: its own count, the length of a list, or a fused weight's first size."""
    declared = getattr(module, "num_experts", None)
    if isinstance(declared, int) and declared > 0:
        return declared
    if isinstance(module, torch.nn.ModuleList):
        return 0  # a plain list is never called, so it sees no choices
    sizes = {int(p.shape[0]) for p in module.parameters(recurse=False) if p.ndim == 3}
    return sizes.pop() if len(sizes) == 1 else 0


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Little-endian numpy name of a route dtype on the wire (`|u1`, `<u2`, `<u4`)."""
    return dtype.newbyteorder("<").str
