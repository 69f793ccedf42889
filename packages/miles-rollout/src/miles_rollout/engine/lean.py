"""The forward pass of the commonest decoder, without the layers of Python around transformers' own.

For small models most of a step is Python: module calls, masks, rotary tables made anew. A model whose modules
are exactly those of a Llama-like decoder (found by structure, not by name) is run by the plain function below on
the same parameters. It is used only after reproducing the model's own forward pass on the probe of `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)

from miles_rollout.engine import attention

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_QK_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: its weight and epsilon."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: torch.nn.Module) -> Norm | None:
        """The norm that a module is; None when it has other state than a weight and an epsilon."""
        eps = getattr(module, "variance_epsilon", None)
        names = [name for name, _ in module.named_parameters()]
        if not isinstance(eps, float) or names != ["weight"] or list(module.children()):
            return None
        return cls(module.get_parameter("weight"), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) in float32, then times the weight, as transformers rounds it."""
        full = x.float()
        scale = full.pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return self.weight * (full * scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one decoder layer. Weights of projections with their bias (None for most models)."""

    module: torch.nn.Module
    heads: int
    kv_heads: int
    head_size: int
    scaling: float
    window: int | None
    input_norm: Norm
    q: tuple[torch.Tensor, torch.Tensor | None]
    k: tuple[torch.Tensor, torch.Tensor | None]
    v: tuple[torch.Tensor, torch.Tensor | None]
    o: tuple[torch.Tensor, torch.Tensor | None]
    q_norm: Norm | None
    k_norm: Norm | None
    post_norm: Norm
    gate: tuple[torch.Tensor, torch.Tensor | None]
    up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]
    activation: torch.nn.Module


class LeanDecoder:
    """The decoder as a function of (token ids, positions, wanted rows); see `build`."""

    def __init__(
        self,
        embedding: torch.Tensor,
        rotary: torch.nn.Module,
        layers: list[Layer],
        norm: Norm,
        head: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        self._embedding = embedding
        self._rotary = rotary
        self._layers = layers
        self._norm = norm
        self._head = head
        self._cos = self._sin = torch.empty(0)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Logits [rows or tokens, vocabulary] of the flat tokens `ids` [tokens] at `positions` [tokens]."""
        hidden = F.embedding(ids, self._embedding)
        cos, sin = self._rotation(positions)
        for layer in self._layers:
            hidden = self._run_layer(layer, hidden, cos, sin)
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return F.linear(self._norm(hidden), *self._head)

    @staticmethod
    def _run_layer(layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = layer.input_norm(hidden)
        tokens, half = len(x), layer.head_size // 2
        q = F.linear(x, *layer.q).view(tokens, layer.heads, layer.head_size)
        k = F.linear(x, *layer.k).view(tokens, layer.kv_heads, layer.head_size)
        v = F.linear(x, *layer.v).view(tokens, layer.kv_heads, -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        # The sine table carries the sign that "rotate half" gives to its first half.
        q = torch.addcmul(q * cos, q.roll(half, -1), sin)
        k = torch.addcmul(k * cos, k.roll(half, -1), sin)
        out, _ = attention.slot_attention(
            layer.module,
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            None,
            scaling=layer.scaling,
            sliding_window=layer.window,
        )
        hidden = _add_linear(hidden, out.view(tokens, -1), layer.o)
        x = layer.post_norm(hidden)
        inner = layer.activation(F.linear(x, *layer.gate)).mul_(F.linear(x, *layer.up))
        return _add_linear(hidden, inner, layer.down)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [tokens, 1, head size], from tables that grow with the longest sequence."""
        need = int(positions.max()) + 1
        if need > len(self._cos):
            size = max(256, 1 << (need - 1).bit_length())
            every = torch.arange(size, device=positions.device)[None]
            cos, sin = self._rotary(self._embedding[:1], every)
            half = sin.shape[-1] // 2
            self._cos = cos[0]
            self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def _add_linear(base: torch.Tensor, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    weight, bias = weights
    total = torch.addmm(base, x, weight.t())
    return total if bias is None else total.add_(bias)


def build(model: Any) -> LeanDecoder | None:
    """The lean form of a model; None when any of its modules is not exactly what the function above does."""
    base, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if base is None or set(_children(model)) != {"model", "lm_head"} or not _plain(head):
        return None
    if set(_children(base)) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    embedding, norm = base.embed_tokens, Norm.of(base.norm)
    if type(embedding) is not torch.nn.Embedding or norm is None:
        return None
    calls = attention.observe(model)
    layers = [_layer(module, calls) for module in base.layers]
    known = [layer for layer in layers if layer is not None]
    if len(known) != len(layers):
        return None
    return LeanDecoder(embedding.weight, base.rotary_emb, known, norm, _weights(head))


def _layer(module: Any, calls: dict[int, attention.Call]) -> Layer | None:
    if set(_children(module)) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return None
    block, mlp = module.self_attn, module.mlp
    normed = set(_children(block)) >= _QK_NORMS
    if set(_children(block)) != _ATTENTION | (_QK_NORMS if normed else set()):
        return None
    if set(_children(mlp)) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    projections = [getattr(block, n) for n in sorted(_ATTENTION)] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [Norm.of(m) for m in (module.input_layernorm, module.post_attention_layernorm)]
    qk = [Norm.of(block.q_norm), Norm.of(block.k_norm)] if normed else [None, None]
    size, call = getattr(block, "head_dim", None), calls.get(getattr(block, "layer_idx", -1))
    if not all(_plain(p) for p in projections) or None in norms or (normed and None in qk):
        return None
    if not isinstance(size, int) or call is None or call.special:
        return None
    first, second = norms
    assert first is not None  # checked above; for the type checker
    assert second is not None
    return Layer(
        module=block,
        heads=block.q_proj.out_features // size,
        kv_heads=block.k_proj.out_features // size,
        head_size=size,
        scaling=call.scaling,
        window=call.window,
        input_norm=first,
        q=_weights(block.q_proj),
        k=_weights(block.k_proj),
        v=_weights(block.v_proj),
        o=_weights(block.o_proj),
        q_norm=qk[0],
        k_norm=qk[1],
        post_norm=second,
        gate=_weights(mlp.gate_proj),
        up=_weights(mlp.up_proj),
        down=_weights(mlp.down_proj),
        activation=mlp.act_fn,
    )


def _children(module: torch.nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]


def _plain(module: Any) -> bool:
    return type(module) is torch.nn.Linear


def _weights(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear.weight, linear.bias
