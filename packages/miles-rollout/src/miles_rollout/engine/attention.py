"""One batched forward pass for sequences of any lengths: attention over KV slots.

The model runs on all new tokens of a step as one flat row [1, tokens]. Our attention function, registered with
transformers' attention interface, writes the new keys and values into their slots and reads each sequence's
context back from its slots. Everything else (projections, norms, rotary embedding, experts) is the model's own
code. Sequences of similar lengths are attended together, padded; a short one never pays for a long one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)
from numpy.typing import NDArray

from miles_rollout.engine.slots import SlotArray

IMPLEMENTATION = "miles_slots"
"""Our name in transformers' attention interface."""

_OBSERVER = "miles_observer"

_SPREAD = 2
"""Sequences share a padded group while the longest is at most this many times the shortest ..."""
_SMALL = 64
"""... or is no longer than this."""


@dataclass(slots=True)
class Group:
    """`rows` sequences that feed `width` tokens each, found at `start` of the flat row.

    Attributes:
        index: slots of the context, int64 [rows * context].
        mask: additive float mask [rows, 1, width, context], None when nothing is masked.
    """

    start: int
    rows: int
    width: int
    context: int
    index: torch.Tensor
    mask: torch.Tensor | None


class SlotPools:
    """Keys and values of every layer: one tensor [slots, KV heads, key size + value size], made at the first use.

    They lie side by side because reading a sequence's context back is one gather then. On a CPU their memory is taken
    page by page as slots come into use: most runs use a small part of what there is room for.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._device = device
        self._pools: dict[int, torch.Tensor] = {}

    def of(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The pool of a layer whose new keys and values look like these ([1, heads, tokens, size])."""
        pool = self._pools.get(layer)
        if pool is None:
            size = keys.shape[3] + values.shape[3]
            pool = _zeros((self.slots, keys.shape[1], size), keys.dtype, self._device)
            self._pools[layer] = pool
        return pool

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in all layers made so far."""
        return sum(pool[0].numel() * pool.element_size() for pool in self._pools.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU fresh pages of the system's, which torch.zeros would write to and so make real."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


@dataclass(slots=True)
class Step:
    """What the attention of one forward pass needs to know: where to write, and what each sequence may read.

    Attributes:
        write: slots of the new tokens, int64 [tokens].
        rows, starts, counts: for each sequence in flat order its table row, first position and number of
            new tokens. Sequences with equal counts must be neighbours for grouping to pay.
    """

    pools: SlotPools
    write: torch.Tensor
    table: SlotArray
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    dtype: torch.dtype
    _groups: dict[int | None, list[Group]] = field(default_factory=dict)

    def groups(self, window: int | None) -> list[Group]:
        """Groups for a sliding window (None: full attention); made once a step, shared by the layers."""
        groups = self._groups.get(window)
        if groups is None:
            groups = self._groups[window] = self._make_groups(window)
        return groups

    def _make_groups(self, window: int | None) -> list[Group]:
        groups: list[Group] = []
        lengths = self.starts + self.counts
        first = np.zeros_like(self.starts) if window is None else np.maximum(self.starts - window + 1, 0)
        spans = (lengths - first).tolist()
        counts = self.counts.tolist()
        begin, at = 0, 0
        if counts[0] == counts[-1] and max(spans) <= max(_SMALL, _SPREAD * min(spans)):  # the usual case
            return [self._group(0, 0, len(counts), max(spans), first, window)]
        while begin < len(counts):
            end, low, high = begin, spans[begin], spans[begin]
            while end < len(counts) and counts[end] == counts[begin]:
                new_low, new_high = min(low, spans[end]), max(high, spans[end])
                if new_high > _SMALL and new_high > _SPREAD * new_low:
                    break
                low, high, end = new_low, new_high, end + 1
            groups.append(self._group(at, begin, end, high, first[begin:end], window))
            at += counts[begin] * (end - begin)
            begin = end
        return groups

    def _group(
        self, at: int, begin: int, end: int, context: int, first: NDArray[np.int64], window: int | None
    ) -> Group:
        rows, width = self.rows[begin:end], int(self.counts[begin])
        if first.any():
            # Positions past the table's edge belong to padding: they are masked, so any slot will do.
            position = np.minimum(first[:, None] + np.arange(context), self.table.shape[1] - 1)
            index = self.table[rows[:, None], position]
        else:
            index = self.table[rows, :context]
        queries = self.starts[begin:end, None] + np.arange(width)  # position of each new token
        left, right = queries - first[:, None], context - 1
        if (left == right).all() and (window is None or context <= window) and width == 1:
            mask = None
        else:
            cells = np.arange(context)
            visible = cells[None, None, :] <= left[:, :, None]
            if window is not None:
                visible &= cells[None, None, :] > left[:, :, None] - window
            mask = torch.zeros(visible.shape, dtype=self.dtype)
            mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
            mask = mask[:, None].to(self.write.device)
        flat = torch.from_numpy(index.reshape(-1)).to(self.write.device)
        return Group(at, end - begin, width, context, flat, mask)


_current: Step | None = None


class active:  # noqa: N801 (used as a statement: `with active(step):`)
    """Makes `step` the one that the attention function serves; forward passes run on one thread."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __enter__(self) -> None:
        global _current
        _current = self._step

    def __exit__(self, *exc: object) -> None:
        global _current
        _current = None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface over slots.

    Args:
        query: [1, heads, tokens, size]; key and value: [1, KV heads, tokens, size].
        attention_mask: not used; the step knows who may see what.
        softcap: logits become softcap * tanh(logits / softcap).
        s_aux: one extra logit a head that takes part in the softmax and has no value (attention sinks).

    Returns:
        [1, tokens, heads, value size].
    """
    step = _current
    if step is None:
        raise RuntimeError("slot attention outside an engine step")
    heads, tokens, size = query.shape[1:]
    kv_heads, value_size = key.shape[1], value.shape[3]
    if scaling is None:
        scaling = size**-0.5
    pool = step.pools.of(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    pool.index_copy_(0, step.write, torch.cat([key[0], value[0]], dim=-1).transpose(0, 1))
    groups = step.groups(sliding_window)
    flat = query[0].transpose(0, 1)  # [tokens, heads, size]
    outputs = []
    for g in groups:
        context = pool.index_select(0, g.index).view(g.rows, g.context, kv_heads, size + value_size).transpose(1, 2)
        k, v = context[..., :size], context[..., size:]
        q = flat[g.start : g.start + g.rows * g.width]
        if g.width == 1 and softcap is None and s_aux is None:
            # The query heads of a KV head become its query positions: nothing is repeated.
            q = q.reshape(g.rows, kv_heads, heads // kv_heads, size)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=g.mask, scale=scaling)
            outputs.append(out.reshape(g.rows, heads, value_size))
            continue
        q = q.reshape(g.rows, g.width, heads, size).transpose(1, 2)
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=g.mask, scale=scaling, enable_gqa=heads != kv_heads)
        else:
            out = _attend_plainly(q, k, v, g.mask, scaling, softcap, s_aux)
        outputs.append(out.transpose(1, 2).reshape(g.rows * g.width, heads, value_size))
    result = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return result.view(1, tokens, heads, value_size), None


def _attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with soft-capped logits or sinks, which the fused kernel lacks; softmax in float32."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(v.dtype), v)


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer asks of the attention function; `special` when it is more than scaling and a window."""

    scaling: float
    window: int | None
    special: bool


def observe(model: Any) -> dict[int, Call]:
    """What each layer of a model asks for, by layer index, seen in a forward pass over one token."""
    calls: dict[int, Call] = {}

    def look(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        special = softcap is not None or s_aux is not None
        calls[int(module.layer_idx)] = Call(scaling or query.shape[3] ** -0.5, sliding_window, special)  # type: ignore[arg-type]
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_OBSERVER, look)
    model.set_attn_implementation(_OBSERVER)
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return calls


def register() -> None:
    """Make our implementation known to transformers; masks are then not built by the model."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, slot_attention)
