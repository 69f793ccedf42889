"""Tensors of large models from a few numbers of their configuration, for planning on paper.

The experts of a layer are described as one stacked tensor [experts, rows, columns]: the bytes are the same and a plan
has a hundred times fewer lines.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from miles_contracts import TensorSpec


class Cut(StrEnum):
    """How a parallel layout may cut a tensor."""

    COLUMN = "column"
    """Along dimension 0 over the tensor-parallel ranks."""
    ROW = "row"
    """Along dimension 1 over the tensor-parallel ranks."""
    EXPERT = "expert"
    """Along dimension 0 over the expert-parallel ranks."""
    WHOLE = "whole"


class PlannedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, how it may be cut, and its layer (None: embedding at the first stage; -1: the last stage)."""

    spec: TensorSpec
    cut: Cut
    layer: int | None


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model. `q_lora` > 0 means multi-head latent attention, else grouped-query attention.

    Attributes:
        dense_layers: layers at the start whose feed-forward is dense.
        index_heads: heads of the sparse-attention indexer (128 wide), 0 for none.
        expert_bytes, other_bytes: per element as it travels (2: bfloat16, 1: 8-bit float).
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    experts: int
    expert_hidden: int
    dense_hidden: int = 0
    dense_layers: int = 0
    shared_experts: int = 0
    kv_heads: int = 0
    head_dim: int = 128
    q_lora: int = 0
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    index_heads: int = 0
    expert_bytes: int = 2
    other_bytes: int = 2

    def tensors(self) -> list[PlannedTensor]:
        """All weights of the model."""
        out: list[PlannedTensor] = []

        def add(name: str, layer: int | None, cut: Cut, *shape: int) -> None:
            num_bytes = self.expert_bytes if cut is Cut.EXPERT else self.other_bytes
            dtype = {1: "float8_e4m3fn", 2: "bfloat16"}[num_bytes]
            out.append(PlannedTensor(spec=TensorSpec(name=name, dtype=dtype, shape=shape), cut=cut, layer=layer))

        add("model.embed_tokens.weight", None, Cut.COLUMN, self.vocab, self.hidden)
        add("lm_head.weight", -1, Cut.COLUMN, self.vocab, self.hidden)
        add("model.norm.weight", -1, Cut.WHOLE, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer:03d}"
            for name, cut, shape in [*self._attention(), *self._feed_forward(layer < self.dense_layers)]:
                add(f"{at}.{name}", layer, cut, *shape)
            add(f"{at}.input_layernorm.weight", layer, Cut.WHOLE, self.hidden)
            add(f"{at}.post_attention_layernorm.weight", layer, Cut.WHOLE, self.hidden)
        return sorted(out, key=lambda t: t.spec.name)

    def _attention(self) -> list[tuple[str, Cut, tuple[int, ...]]]:
        if not self.q_lora:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            return [
                ("self_attn.q_proj.weight", Cut.COLUMN, (q, self.hidden)),
                ("self_attn.k_proj.weight", Cut.COLUMN, (kv, self.hidden)),
                ("self_attn.v_proj.weight", Cut.COLUMN, (kv, self.hidden)),
                ("self_attn.o_proj.weight", Cut.ROW, (self.hidden, q)),
            ]
        query = self.heads * (self.nope_dim + self.rope_dim)
        out: list[tuple[str, Cut, tuple[int, ...]]] = [
            ("self_attn.q_a_proj.weight", Cut.WHOLE, (self.q_lora, self.hidden)),
            ("self_attn.q_b_proj.weight", Cut.COLUMN, (query, self.q_lora)),
            ("self_attn.kv_a_proj.weight", Cut.WHOLE, (self.kv_lora + self.rope_dim, self.hidden)),
            ("self_attn.kv_b_proj.weight", Cut.COLUMN, (self.heads * (self.nope_dim + self.v_dim), self.kv_lora)),
            ("self_attn.o_proj.weight", Cut.ROW, (self.hidden, self.heads * self.v_dim)),
        ]
        if self.index_heads:
            out += [
                ("self_attn.indexer.wq_b.weight", Cut.WHOLE, (self.index_heads * 128, self.q_lora)),
                ("self_attn.indexer.wk.weight", Cut.WHOLE, (128, self.hidden)),
                ("self_attn.indexer.weights_proj.weight", Cut.WHOLE, (self.index_heads, self.hidden)),
            ]
        return out

    def _feed_forward(self, dense: bool) -> list[tuple[str, Cut, tuple[int, ...]]]:
        def mlp(at: str, width: int) -> list[tuple[str, Cut, tuple[int, ...]]]:
            return [
                (f"{at}.gate_proj.weight", Cut.COLUMN, (width, self.hidden)),
                (f"{at}.up_proj.weight", Cut.COLUMN, (width, self.hidden)),
                (f"{at}.down_proj.weight", Cut.ROW, (self.hidden, width)),
            ]

        if dense or not self.experts:
            return mlp("mlp", self.dense_hidden)
        out: list[tuple[str, Cut, tuple[int, ...]]] = [
            ("mlp.gate.weight", Cut.WHOLE, (self.experts, self.hidden)),
            ("mlp.experts.gate_up_proj", Cut.EXPERT, (self.experts, 2 * self.expert_hidden, self.hidden)),
            ("mlp.experts.down_proj", Cut.EXPERT, (self.experts, self.hidden, self.expert_hidden)),
        ]
        if self.shared_experts:
            out += mlp("mlp.shared_experts", self.shared_experts * self.expert_hidden)
        return out


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3-30b-a3b": Architecture(
        layers=48, hidden=2048, vocab=151936, heads=32, kv_heads=4, experts=128, expert_hidden=768
    ),
    "glm-4.5-air": Architecture(
        layers=46,
        hidden=4096,
        vocab=151552,
        heads=96,
        kv_heads=8,
        experts=128,
        expert_hidden=1408,
        dense_hidden=10944,
        dense_layers=1,
        shared_experts=1,
    ),
    "qwen3-235b-a22b": Architecture(
        layers=94, hidden=4096, vocab=151936, heads=64, kv_heads=4, experts=128, expert_hidden=1536
    ),
    "glm-5.2": Architecture(
        layers=78,
        hidden=6144,
        vocab=154880,
        heads=64,
        experts=256,
        expert_hidden=2048,
        dense_hidden=12288,
        dense_layers=3,
        shared_experts=1,
        q_lora=2048,
        kv_lora=512,
        nope_dim=192,
        rope_dim=64,
        v_dim=256,
        index_heads=32,
    ),
    "kimi-k2": Architecture(
        layers=61,
        hidden=7168,
        vocab=163840,
        heads=64,
        experts=384,
        expert_hidden=2048,
        dense_hidden=18432,
        dense_layers=1,
        shared_experts=1,
        q_lora=1536,
        kv_lora=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
    ),
}
"""Models with published update times."""
