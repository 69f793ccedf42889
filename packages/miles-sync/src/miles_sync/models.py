"""A large model on paper, from the words of its config.json: its tensors, how they may be cut, what they add up to.

Known are decoders with full attention (grouped heads, or latent as in DeepSeek's family, also with its sparse index)
and dense or mixture-of-experts blocks. Anything else is refused: a wrong figure would look like an answer.

The experts of a layer are described as one stacked tensor [experts, rows, columns]: the bytes are the same and a plan
has a hundred times fewer lines. Vectors other than the layers' norms (biases, norms of heads) are left out: together
they are less than a ten-thousandth.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, TensorSpec

_UNKNOWN = (
    "linear_num_key_heads",
    "mamba_num_heads",
    "linear_attn_config",
    "compress_ratios",
    "hybrid_override_pattern",
)
"""Keys of attention that this module does not know."""
_EVERY_LAYER = {"decoder_sparse_step": 1, "moe_layer_freq": 1, "mlp_only_layers": []}
"""Keys that say which layers have experts, with the value for all of them but the first `first_k_dense_replace`."""


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


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """The attention of every layer; `kv_lora` > 0 means latent attention, else grouped queries.

    Attributes:
        heads: of queries.
        kv_heads, head_dim: grouped: of keys and values; the width of every head.
        q_lora: latent: rank of the queries, 0 when they are made in one step.
        kv_lora: latent: rank of keys and values.
        nope_dim, rope_dim, v_dim: latent: widths of a head.
        index_heads, index_dim: of the sparse index; 0 for none.
        index_topk: tokens that it chooses.
    """

    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0

    def tensors(self, hidden: int) -> list[tuple[str, Cut, tuple[int, ...]]]:
        """Of one layer."""
        if not self.kv_lora:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            return [
                ("self_attn.q_proj.weight", Cut.COLUMN, (q, hidden)),
                ("self_attn.k_proj.weight", Cut.COLUMN, (kv, hidden)),
                ("self_attn.v_proj.weight", Cut.COLUMN, (kv, hidden)),
                ("self_attn.o_proj.weight", Cut.ROW, (hidden, q)),
            ]
        query = self.heads * (self.nope_dim + self.rope_dim)
        out: list[tuple[str, Cut, tuple[int, ...]]] = [
            ("self_attn.kv_a_proj.weight", Cut.WHOLE, (self.kv_lora + self.rope_dim, hidden)),
            ("self_attn.kv_b_proj.weight", Cut.COLUMN, (self.heads * (self.nope_dim + self.v_dim), self.kv_lora)),
            ("self_attn.o_proj.weight", Cut.ROW, (hidden, self.heads * self.v_dim)),
        ]
        if self.q_lora:
            out.append(("self_attn.q_a_proj.weight", Cut.WHOLE, (self.q_lora, hidden)))
            out.append(("self_attn.q_b_proj.weight", Cut.COLUMN, (query, self.q_lora)))
        else:
            out.append(("self_attn.q_proj.weight", Cut.COLUMN, (query, hidden)))
        if self.index_heads:
            source = self.q_lora or hidden
            out += [
                ("self_attn.indexer.wq_b.weight", Cut.WHOLE, (self.index_heads * self.index_dim, source)),
                ("self_attn.indexer.wk.weight", Cut.WHOLE, (self.index_dim, hidden)),
                ("self_attn.indexer.weights_proj.weight", Cut.WHOLE, (self.index_heads, hidden)),
            ]
        return out

    @property
    def cached(self) -> int:
        """Numbers that one layer keeps for one token of context."""
        if not self.kv_lora:
            return 2 * self.kv_heads * self.head_dim
        return self.kv_lora + self.rope_dim + self.index_dim

    @property
    def read_per_token(self) -> int:
        """Numbers that a decoding step reads for one token of context."""
        return self.index_dim or self.cached

    @property
    def read_per_sequence(self) -> int:
        """Numbers that it reads whatever the context: what the sparse index has chosen."""
        return self.index_topk * (self.kv_lora + self.rope_dim)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model.

    Attributes:
        name: for people.
        dense_hidden: inner size of dense feed-forwards, 0 where there are none.
        dense_layers: layers at the start whose feed-forward is dense; all of a model without experts.
        experts, experts_per_token: routed experts of a layer, and how many of them a token needs.
        expert_hidden: inner size of a routed expert.
        shared_hidden: inner size of all shared experts of a layer together.
        tied: the output head is the embedding.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: Attention
    dense_hidden: int = 0
    dense_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    tied: bool = False

    def tensors(self, *, expert_dtype: str = "bfloat16", dtype: str = "bfloat16") -> list[PlannedTensor]:
        """All weights of the model, sorted by name.

        Args:
            expert_dtype: of routed experts as they travel.
            dtype: of everything else.
        """
        out: list[PlannedTensor] = []

        def add(name: str, layer: int | None, cut: Cut, *shape: int) -> None:
            kept = expert_dtype if cut is Cut.EXPERT else dtype
            out.append(PlannedTensor(spec=TensorSpec(name=name, dtype=kept, shape=shape), cut=cut, layer=layer))

        add("model.embed_tokens.weight", None, Cut.COLUMN, self.vocab, self.hidden)
        if not self.tied:
            add("lm_head.weight", -1, Cut.COLUMN, self.vocab, self.hidden)
        add("model.norm.weight", -1, Cut.WHOLE, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer:03d}"
            for name, cut, shape in [*self.attention.tensors(self.hidden), *self._feed_forward(layer)]:
                add(f"{at}.{name}", layer, cut, *shape)
            add(f"{at}.input_layernorm.weight", layer, Cut.WHOLE, self.hidden)
            add(f"{at}.post_attention_layernorm.weight", layer, Cut.WHOLE, self.hidden)
        return sorted(out, key=lambda t: t.spec.name)

    def _feed_forward(self, layer: int) -> list[tuple[str, Cut, tuple[int, ...]]]:
        def mlp(at: str, width: int) -> list[tuple[str, Cut, tuple[int, ...]]]:
            return [
                (f"{at}.gate_proj.weight", Cut.COLUMN, (width, self.hidden)),
                (f"{at}.up_proj.weight", Cut.COLUMN, (width, self.hidden)),
                (f"{at}.down_proj.weight", Cut.ROW, (self.hidden, width)),
            ]

        if layer < self.dense_layers:
            return mlp("mlp", self.dense_hidden)
        out: list[tuple[str, Cut, tuple[int, ...]]] = [
            ("mlp.gate.weight", Cut.WHOLE, (self.experts, self.hidden)),
            ("mlp.experts.gate_up_proj", Cut.EXPERT, (self.experts, 2 * self.expert_hidden, self.hidden)),
            ("mlp.experts.down_proj", Cut.EXPERT, (self.experts, self.hidden, self.expert_hidden)),
        ]
        if self.shared_hidden:
            out += mlp("mlp.shared_experts", self.shared_hidden)
        return out

    def shape(self) -> ModelShape:
        """What its matrices and its context add up to."""
        tensors = [t for t in self.tensors() if len(t.spec.shape) > 1]
        experts = sum(t.spec.num_elements for t in tensors if t.cut is Cut.EXPERT)
        table = self.vocab * self.hidden
        return ModelShape(
            name=self.name,
            layers=self.layers,
            always=sum(t.spec.num_elements for t in tensors) - experts - (0 if self.tied else table),
            experts=experts,
            embedding=0 if self.tied else table,
            expert_share=self.experts_per_token / self.experts if self.experts else 1.0,
            cache_elements=self.layers * self.attention.cached,
            read_per_context=self.layers * self.attention.read_per_token,
            read_per_sequence=self.layers * self.attention.read_per_sequence,
        )


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Parameter counts and what one token of context leaves behind.

    Attributes:
        name: for people.
        layers: decoder blocks.
        always: parameters that every token needs, input embedding excluded (a look-up).
        experts: parameters of all routed experts.
        embedding: parameters of the input embedding, 0 when it is the output's.
        expert_share: experts per token over experts; 1 for a dense model.
        cache_elements: numbers kept for one token of context, all layers.
        read_per_context: numbers that a decoding step reads for one token of context.
        read_per_sequence: numbers that it reads for a sequence whatever its context (sparse attention's choice).
    """

    name: str
    layers: int
    always: int
    experts: int = 0
    embedding: int = 0
    expert_share: float = 1.0
    cache_elements: int = 0
    read_per_context: int = 0
    read_per_sequence: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return self.always + self.experts + self.embedding

    @property
    def active(self) -> float:
        """Parameters that one token needs."""
        return self.always + self.experts * self.expert_share

    @property
    def is_mixture(self) -> bool:
        """True for a mixture of experts."""
        return self.experts > 0


def known_models() -> dict[str, dict[str, Any]]:
    """The published configurations that come with the planner, by name."""
    return tomllib.loads((files("miles_sync") / "models.toml").read_text("utf-8"))


def find_model(model: str) -> Architecture:
    """A known model, or that of a folder (or file) with a config.json.

    Raises:
        InvalidFieldError: neither, or a kind of model that is not known.
    """
    table = known_models()
    if model.lower() in table:
        return architecture_of(model.lower(), table[model.lower()])
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        close = get_close_matches(model.lower(), table, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InvalidFieldError("model", model, f"{hint}use {', '.join(table)}, or a folder with config.json")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFieldError("model", str(path), f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidFieldError("model", str(path), "this is no config.json: it holds no JSON object")
    text = config.get("text_config")
    return architecture_of(Path(model).name, text if isinstance(text, dict) else config)


def architecture_of(name: str, config: Mapping[str, Any]) -> Architecture:
    """What a configuration describes.

    Raises:
        InvalidFieldError: a key is missing, the attention is of a kind that is not known, or the layers with experts
            are not the last ones.
    """
    kinds = {kind for kind in config.get("layer_types") or () if kind not in ("full_attention", "sliding_attention")}
    strange = sorted(kinds | {key for key in _UNKNOWN if config.get(key)})
    if strange:
        raise InvalidFieldError("model", strange[0], f"{name} has attention of a kind that is not known")
    need = _Config(name, config)
    hidden, layers = need("hidden_size"), need("num_hidden_layers")
    mixture = next((k for k in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(k)), None)
    for key, plain in _EVERY_LAYER.items():
        if mixture and config.get(key) not in (None, plain):
            raise InvalidFieldError("model", f"{key} = {config[key]}", f"{name} has experts in some of its layers only")
    dense = layers if mixture is None else need("first_k_dense_replace", 0)
    inner = need("moe_intermediate_size") if mixture else 0
    shared = need("n_shared_experts", 0) * inner + need("shared_expert_intermediate_size", 0) if mixture else 0
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=need("vocab_size"),
        attention=_attention(need, hidden),
        dense_hidden=need("intermediate_size") if dense else 0,
        dense_layers=dense,
        experts=need(mixture) if mixture else 0,
        experts_per_token=need("num_experts_per_tok") if mixture else 0,
        expert_hidden=inner,
        shared_hidden=shared,
        tied=bool(config.get("tie_word_embeddings")),
    )


class _Config:
    """Whole numbers of a configuration, by name."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 0:
            raise InvalidFieldError(f"config.json of {self._name}: {key}", value, "a whole number is needed here")
        return value

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self._config.get(key) is not None


def _attention(need: _Config, hidden: int) -> Attention:
    heads = need("num_attention_heads")
    if not need.has("kv_lora_rank"):
        width = need("head_dim", hidden // heads)
        return Attention(heads=heads, kv_heads=need("num_key_value_heads", heads), head_dim=width)
    sparse = need.has("index_topk")
    return Attention(
        heads=heads,
        q_lora=need("q_lora_rank", 0),
        kv_lora=need("kv_lora_rank"),
        nope_dim=need("qk_nope_head_dim"),
        rope_dim=need("qk_rope_head_dim"),
        v_dim=need("v_head_dim"),
        index_heads=need("index_n_heads") if sparse else 0,
        index_dim=need("index_head_dim") if sparse else 0,
        index_topk=need("index_topk") if sparse else 0,
    )
