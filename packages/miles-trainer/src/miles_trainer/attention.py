"""Packed causal attention: every trajectory attends to itself only, and none pays for another's length.

Linear layers see the packed tokens [1, N]; only inside attention the trajectories are laid out as rows of a
few rectangles (similar lengths share one), because a block-diagonal mask over N tokens would cost N^2.
Padding stands at the end of a row, where causality hides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAME = "miles_varlen"
_WASTE = 0.75
"""A rectangle holds trajectories at least this fraction of its longest one."""


class UnsupportedAttentionError(RuntimeError):
    """The model's attention asks for something that this function does not compute."""


@dataclass(frozen=True)
class Rectangle:
    """Rows x width positions; `gather` [rows * width] are indices into the packed tokens."""

    rows: int
    width: int
    gather: Tensor


@dataclass(frozen=True)
class VarlenLayout:
    """How packed tokens map to rectangles and back.

    Attributes:
        rectangles: together they hold every token once (and repeats as padding).
        scatter: int64 [N], where each token's output is in the concatenated rectangles.
        identity: True when the packed order already is one rectangle without padding.
    """

    rectangles: tuple[Rectangle, ...]
    scatter: Tensor
    identity: bool


def layout_of(lengths: NDArray[np.int64], device: torch.device) -> VarlenLayout:
    """Rectangles for trajectories of these lengths, laid end to end in this order."""
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    scatter = np.empty(int(lengths.sum()), dtype=np.int64)
    rectangles: list[Rectangle] = []
    base = first = 0
    while first < len(order) and lengths[order[first]] > 0:
        width = int(lengths[order[first]])
        # lengths fall along `order`, so the rows of one rectangle are contiguous there
        last = first + int(np.count_nonzero(lengths[order[first:]] >= max(1.0, _WASTE * width)))
        rows = order[first:last]
        columns = np.arange(width)
        inside = columns[None, :] < lengths[rows, None]
        index = starts[rows, None] + np.minimum(columns[None, :], lengths[rows, None] - 1)
        places = base + np.arange(len(rows) * width).reshape(len(rows), width)
        scatter[index[inside]] = places[inside]
        rectangles.append(Rectangle(len(rows), width, torch.from_numpy(index.reshape(-1)).to(device)))
        base += len(rows) * width
        first = last
    identity = len(rectangles) == 1 and bool(np.array_equal(scatter, np.arange(len(scatter)))) and base == len(scatter)
    return VarlenLayout(tuple(rectangles), torch.from_numpy(scatter).to(device), identity)


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed tokens, with the signature transformers gives to attention functions.

    Args:
        module: the attention module, asked for `num_key_value_groups` only.
        query: [1, heads, N, D]; key [1, kv_heads, N, D]; value [1, kv_heads, N, Dv].
        attention_mask: must be None; the layout says it all.
        dropout: must be 0.
        scaling: factor of the scores; None is 1 / sqrt(D).
        kwargs: `miles_layout`, a VarlenLayout, is required.

    Returns:
        [1, N, heads, Dv] and None.

    Raises:
        UnsupportedAttentionError: no layout, or a window shorter than a trajectory, sinks, soft caps, biases.
    """
    layout = kwargs.get("miles_layout")
    if not isinstance(layout, VarlenLayout):
        raise UnsupportedAttentionError("the model does not hand keyword arguments down to its attention")
    _refuse_extras(attention_mask, dropout, kwargs, layout)
    if query.shape[0] != 1:
        raise UnsupportedAttentionError("packed attention needs one row")
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for box in layout.rectangles:
        q, k, v = (_rows(x, box, identity=layout.identity) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).reshape(box.rows * box.width, query.shape[1], value.shape[-1]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (flat if layout.identity else flat.index_select(0, layout.scatter))[None], None


def _rows(x: Tensor, box: Rectangle, *, identity: bool) -> Tensor:
    """[1, heads, N, D] to [rows, heads, width, D]."""
    tokens = x[0].transpose(0, 1)
    if not identity:
        tokens = tokens.index_select(0, box.gather)
    return tokens.reshape(box.rows, box.width, x.shape[1], x.shape[-1]).transpose(1, 2)


def _refuse_extras(mask: Tensor | None, dropout: float, kwargs: dict[str, Any], layout: VarlenLayout) -> None:
    if mask is not None or dropout:
        raise UnsupportedAttentionError("packed attention takes neither a mask nor dropout")
    for name in ("softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"packed attention has no {name}")
    window = kwargs.get("sliding_window")
    if window is not None and any(box.width > window for box in layout.rectangles):
        raise UnsupportedAttentionError(f"a trajectory is longer than the attention window of {window}")
    if kwargs.get("is_causal") is False:
        raise UnsupportedAttentionError("packed attention is causal")


def register() -> None:
    """Make `attn_implementation="miles_varlen"` known to transformers (idempotent)."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout replaces the mask."""
