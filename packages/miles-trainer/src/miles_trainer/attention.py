"""Packed causal attention: every trajectory attends to itself only, and none pays for another's length.

Linear layers see the packed tokens [1, N]; only inside attention they are laid out as rows of a few rectangles
(similar lengths share one), because a block-diagonal mask over N tokens would cost N^2. Padding stands at the
end of a row, where causality hides it. A row may have a prefix that other rows attend to as well.
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
"""A rectangle holds chunks at least this fraction of its longest one."""
_OWN_MASK = 256
"""Rows up to this width may have a mask each."""
_NEVER = 1 << 40


class UnsupportedAttentionError(RuntimeError):
    """The model's attention asks for something that this function does not compute."""


@dataclass(frozen=True)
class Rectangle:
    """Rows of queries, width each, and for every row its keys: a shared prefix, then the row's own tokens.

    Attributes:
        rows: number of rows.
        width: queries a row.
        queries: int64 [rows * width], indices into the packed tokens.
        keys: int64 [rows * (prefix + width)].
        prefix: key columns for the prefix; shorter prefixes leave the last of them unused.
        prefix_lengths: int64 [rows], or [1] when all rows agree.
        masks: filled on demand, by window.
    """

    rows: int
    width: int
    queries: Tensor
    keys: Tensor
    prefix: int
    prefix_lengths: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def plain_causal(self, window: int | None) -> bool:
        """Whether an ordinary causal mask says it all."""
        return self.prefix == 0 and (window is None or self.width <= window)

    def allowed(self, window: int | None) -> Tensor:
        """bool [rows or 1, 1, width, prefix + width]: which keys a query sees."""
        if window not in self.masks:
            device = self.queries.device
            before = self.prefix_lengths[:, None]
            column = torch.arange(self.prefix, device=device)[None, :]
            own = before + torch.arange(self.width, device=device)[None, :]
            # an unused column gets a position after every query
            place = torch.cat([torch.where(column < before, column, _NEVER).expand(len(before), -1), own], dim=1)
            distance = own[:, :, None] - place[:, None, :]
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self.masks[window] = seen[:, None]
        return self.masks[window]


@dataclass(frozen=True)
class VarlenLayout:
    """How packed tokens map to rectangles and back.

    Attributes:
        rectangles: together they hold every token once as a query (and repeats as padding).
        scatter: int64 [N], where each token's output is in the concatenated rectangles.
        identity: True when the packed order already is one rectangle without padding or prefixes.
        windows: the window each attention call asked for, in order; a probe reads it.
    """

    rectangles: tuple[Rectangle, ...]
    scatter: Tensor
    identity: bool
    windows: list[int | None] = field(default_factory=list)


def layout_of(
    lengths: NDArray[np.int64], device: torch.device, prefix: NDArray[np.int64] | None = None
) -> VarlenLayout:
    """Rectangles for chunks of these lengths, laid end to end in this order.

    Args:
        lengths: int64 [C].
        device: of the index tensors.
        prefix: int64 [C], the chunk whose tokens every chunk also attends to, or -1; None when there is none.
    """
    starts = np.cumsum(lengths) - lengths
    before = np.zeros_like(lengths) if prefix is None else np.where(prefix >= 0, lengths[prefix], 0)
    roots = starts if prefix is None else starts[np.maximum(prefix, 0)]
    scatter = np.empty(int(lengths.sum()), dtype=np.int64)
    rectangles: list[Rectangle] = []
    base = 0
    left = np.argsort(-lengths, kind="stable")
    left = left[lengths[left] > 0]
    while len(left):
        chosen = _similar(left, lengths, before)
        rows, left = left[chosen], left[~chosen]
        width, pad = int(lengths[rows[0]]), int(before[rows].max())
        columns, prefix_columns = np.arange(width), np.arange(pad)
        queries = starts[rows, None] + np.minimum(columns[None, :], lengths[rows, None] - 1)
        # unused prefix columns repeat a token of the row itself
        used = prefix_columns[None, :] < before[rows, None]
        shared = np.where(used, roots[rows, None] + prefix_columns[None, :], starts[rows, None])
        inside = columns[None, :] < lengths[rows, None]
        places = base + np.arange(queries.size).reshape(queries.shape)
        scatter[queries[inside]] = places[inside]
        own = torch.from_numpy(queries.reshape(-1)).to(device)
        keys = torch.from_numpy(np.concatenate([shared, queries], axis=1).reshape(-1)).to(device) if pad else own
        counts = before[rows[:1]] if (before[rows] == before[rows[0]]).all() else before[rows]
        rectangles.append(Rectangle(len(rows), width, own, keys, pad, torch.from_numpy(counts).to(device)))
        base += queries.size
    identity = len(rectangles) == 1 and rectangles[0].prefix == 0 and np.array_equal(scatter, np.arange(base))
    return VarlenLayout(tuple(rectangles), torch.from_numpy(scatter).to(device), identity)


def _similar(left: NDArray[np.int64], lengths: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the chunks `left` (longest first) go into one rectangle with the first of them."""
    width, prefix = int(lengths[left[0]]), int(before[left[0]])
    chosen: NDArray[np.bool_] = lengths[left] >= max(1.0, _WASTE * width)
    if prefix == 0 or width > _OWN_MASK:
        # rows that agree on the prefix share one mask; a mask for every row is only cheap while rows are short
        chosen &= before[left] == prefix
    else:
        chosen &= (before[left] >= _WASTE * prefix) & (before[left] <= prefix / _WASTE)
    return chosen


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
        q = _rows(query, box.rows, None if layout.identity else box.queries)
        k, v = (_rows(x, box.rows, None if layout.identity else box.keys) for x in (key, value))
        out = _attend(q, k, v, box, scaling, window, **extras)
        outputs.append(out.transpose(1, 2).reshape(box.rows * box.width, query.shape[1], value.shape[-1]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (flat if layout.identity else flat.index_select(0, layout.scatter))[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    box: Rectangle,
    scaling: float | None,
    window: int | None,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of one rectangle, [rows, heads, width, Dv]."""
    if softcap is None and sinks is None:
        plain = box.plain_causal(window)
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if plain else box.allowed(window),
            is_causal=plain,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~box.allowed(window), float("-inf"))
    if sinks is not None:
        # a sink takes part in the softmax and gives nothing to the output
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores.float() if scores.dtype != torch.float64 else scores, dim=-1).to(v.dtype)
    return weights[..., : k.shape[2]] @ v


def _rows(x: Tensor, rows: int, gather: Tensor | None) -> Tensor:
    """[1, heads, N, D] to [rows, heads, columns, D]."""
    tokens = x.squeeze(0).transpose(0, 1)  # not x[0], whose gradient is a copy into zeros
    if gather is not None:
        tokens = tokens.index_select(0, gather)
    return tokens.reshape(rows, -1, x.shape[1], x.shape[-1]).transpose(1, 2)


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
