"""Packed causal attention: every trajectory attends to itself only, and none pays for another's length.

Linear layers see the packed tokens [1, N]; only inside attention the trajectories are laid out as rows of a
few rectangles (similar lengths share one), because a block-diagonal mask over N tokens would cost N^2.
Padding stands at the end of a row, where causality hides it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
        windows: the window each attention call asked for, in order; a probe reads it.
    """

    rectangles: tuple[Rectangle, ...]
    scatter: Tensor
    identity: bool
    windows: list[int | None] = field(default_factory=list)


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
        kwargs: `miles_layout`, a VarlenLayout, is required; `sliding_window`, `softcap` and `s_aux` (one sink
            logit a head) are applied.

    Returns:
        [1, N, heads, Dv] and None.

    Raises:
        UnsupportedAttentionError: no layout, or a mask, dropout, position bias or bidirectional attention.
    """
    layout = kwargs.get("miles_layout")
    if not isinstance(layout, VarlenLayout):
        raise UnsupportedAttentionError("the model does not hand keyword arguments down to its attention")
    _refuse_extras(attention_mask, dropout, kwargs)
    if query.shape[0] != 1:
        raise UnsupportedAttentionError("packed attention needs one row")
    window = kwargs.get("sliding_window")
    layout.windows.append(window)
    extras = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    outputs = []
    for box in layout.rectangles:
        q, k, v = (_rows(x, box, identity=layout.identity) for x in (query, key, value))
        out = _attend(q, k, v, scaling, window, **extras)
        outputs.append(out.transpose(1, 2).reshape(box.rows * box.width, query.shape[1], value.shape[-1]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (flat if layout.identity else flat.index_select(0, layout.scatter))[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    window: int | None,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of one rectangle, [rows, heads, width, Dv]."""
    width = q.shape[2]
    mask: Tensor | None = None
    if (window is not None and width > window) or softcap is not None or sinks is not None:
        place = torch.arange(width, device=q.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < (window if window is not None else width))
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # a sink takes part in the softmax and gives nothing to the output
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores.float() if scores.dtype != torch.float64 else scores, dim=-1).to(v.dtype)
    return weights[..., :width] @ v


def _rows(x: Tensor, box: Rectangle, *, identity: bool) -> Tensor:
    """[1, heads, N, D] to [rows, heads, width, D]."""
    tokens = x[0].transpose(0, 1)
    if not identity:
        tokens = tokens.index_select(0, box.gather)
    return tokens.reshape(box.rows, box.width, x.shape[1], x.shape[-1]).transpose(1, 2)


def _refuse_extras(mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if mask is not None or dropout:
        raise UnsupportedAttentionError("packed attention takes neither a mask nor dropout")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttentionError("packed attention has no position bias")
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
