"""A routing trace (R3) records which experts each token chose, in the narrowest exact dtype."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts.errors import InvalidFieldError


def narrowest_dtype(num_experts: int) -> np.dtype[Any]:
    """Smallest unsigned dtype that holds expert ids 0 .. num_experts - 1."""
    if num_experts < 1:
        raise InvalidFieldError("num_experts", num_experts, "a mixture has at least one expert")
    return np.dtype(np.uint8 if num_experts <= 1 << 8 else np.uint16 if num_experts <= 1 << 16 else np.uint32)


class RoutingTrace(msgspec.Struct, frozen=True, kw_only=True, tag="routing", eq=False):
    """Expert ids chosen by each MoE layer.

    Attributes:
        expert_ids: [rows, layers, top_k] in `narrowest_dtype(num_experts)`; row t belongs to token t of the
            trajectory. The last token was never fed to the model, so a complete trace has T - 1 rows.
        num_experts: experts per layer.
    """

    expert_ids: NDArray[Any]
    num_experts: int

    def __post_init__(self) -> None:
        ids = self.expert_ids
        want = narrowest_dtype(self.num_experts)
        if not isinstance(ids, np.ndarray) or ids.ndim != 3:
            shape = getattr(ids, "shape", type(ids).__name__)
            raise InvalidFieldError("RoutingTrace.expert_ids", shape, "give an array [rows, layers, top_k]")
        if ids.dtype != want:
            raise InvalidFieldError("RoutingTrace.expert_ids", ids.dtype.name, f"use {want.name} (RoutingTrace.of)")
        if ids.size and int(ids.max()) >= self.num_experts:
            raise InvalidFieldError("RoutingTrace.expert_ids", int(ids.max()), f"ids are < {self.num_experts}")
        if ids.flags.writeable:
            view = ids.view()
            view.flags.writeable = False
            msgspec.structs.force_setattr(self, "expert_ids", view)

    @classmethod
    def of(cls, expert_ids: NDArray[Any], num_experts: int) -> RoutingTrace:
        """Build from ids of any integer dtype (an array, or what `np.asarray` makes one of); ids outside
        [0, num_experts) are refused, never wrapped."""
        expert_ids = np.asarray(expert_ids)
        if expert_ids.size and (int(expert_ids.min()) < 0 or int(expert_ids.max()) >= num_experts):
            bad = int(expert_ids.min()) if int(expert_ids.min()) < 0 else int(expert_ids.max())
            raise InvalidFieldError("expert_ids", bad, f"ids are in [0, {num_experts})")
        return cls(expert_ids=expert_ids.astype(narrowest_dtype(num_experts), copy=False), num_experts=num_experts)

    @property
    def num_tokens(self) -> int:
        """Rows, one per token that the model was fed."""
        return int(self.expert_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts chosen per token and layer."""
        return int(self.expert_ids.shape[2])

    @property
    def num_bytes(self) -> int:
        """Bytes of the ids in memory."""
        return int(self.expert_ids.nbytes)

    def slice(self, start: int, end: int) -> RoutingTrace:
        """Rows start .. end - 1, as a view."""
        if not 0 <= start <= end <= self.num_tokens:
            raise InvalidFieldError("slice", (start, end), f"stay inside [0, {self.num_tokens}]")
        return RoutingTrace(expert_ids=self.expert_ids[start:end], num_experts=self.num_experts)

    @staticmethod
    def concat(traces: list[RoutingTrace]) -> RoutingTrace:
        """Rows of all traces in order; layers, top_k and num_experts must agree."""
        if not traces:
            raise InvalidFieldError("traces", traces, "give at least one trace")
        kinds = {(t.num_layers, t.top_k, t.num_experts) for t in traces}
        if len(kinds) > 1:
            raise InvalidFieldError("traces", sorted(kinds), "layers, top_k and experts must agree")
        ids = np.concatenate([t.expert_ids for t in traces]) if len(traces) > 1 else traces[0].expert_ids
        return RoutingTrace(expert_ids=ids, num_experts=traces[0].num_experts)
