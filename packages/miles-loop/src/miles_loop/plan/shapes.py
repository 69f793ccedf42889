"""A model's shape: how many parameters a token needs, and what its context costs, from the words of config.json.

Known are decoders with full attention (grouped heads, or latent as in DeepSeek's family, also with its sparse index)
and dense or mixture-of-experts blocks. Anything else is refused: a wrong figure would look like an answer.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError
from miles_loop.names import nearest

_UNKNOWN = (
    "linear_num_key_heads",
    "mamba_num_heads",
    "linear_attn_config",
    "compress_ratios",
    "hybrid_override_pattern",
)
"""Keys of attention that this module does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
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
    """The published shapes that come with the planner, by name."""
    return tomllib.loads((files("miles_loop.plan") / "presets" / "models.toml").read_text("utf-8"))


def find_shape(model: str) -> ModelShape:
    """The shape of a known model, or of a folder (or file) with a config.json.

    Raises:
        InvalidFieldError: neither, or a kind of model that is not known.
    """
    table = known_models()
    if model.lower() in table:
        return shape_of(model.lower(), table[model.lower()])
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        hint = nearest(model.lower(), table)
        raise InvalidFieldError("hardware.model", model, f"{hint}use {', '.join(table)}, or a folder with config.json")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFieldError("hardware.model", str(path), f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidFieldError("hardware.model", str(path), "this is no config.json: it holds no JSON object")
    text = config.get("text_config")
    return shape_of(Path(model).name, text if isinstance(text, dict) else config)


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a configuration describes.

    Raises:
        InvalidFieldError: a key is missing, or the attention is of a kind that is not known.
    """
    kinds = {kind for kind in config.get("layer_types") or () if kind not in ("full_attention", "sliding_attention")}
    strange = sorted(kinds | {key for key in _UNKNOWN if config.get(key)})
    if strange:
        raise InvalidFieldError(
            "hardware.model",
            strange[0],
            f"{name} has attention of a kind that is not known; give engine.* and trainer.*",
        )
    need = _Config(name, config)
    hidden, layers = need("hidden_size"), need("num_hidden_layers")
    attention, cache, per_context, per_sequence = _attention(need, hidden)
    mixture = next((k for k in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(k)), None)
    head = need("vocab_size") * hidden
    always, experts, share = layers * attention + head, 0, 1.0
    if mixture is None:
        always += layers * 3 * hidden * need("intermediate_size")
    else:
        one = 3 * hidden * need("moe_intermediate_size")
        dense = need("first_k_dense_replace", 0)
        sparse = layers - dense
        shared = need("n_shared_experts", 0) * one + 3 * hidden * need("shared_expert_intermediate_size", 0)
        count = need(mixture)
        experts = sparse * count * one
        share = need("num_experts_per_tok") / count
        always += sparse * (shared + hidden * count)
        always += dense * 3 * hidden * (need("intermediate_size") if dense else 0)
    return ModelShape(
        name=name,
        layers=layers,
        always=always,
        experts=experts,
        embedding=0 if config.get("tie_word_embeddings") else head,
        expert_share=share,
        cache_elements=layers * cache,
        read_per_context=layers * per_context,
        read_per_sequence=layers * per_sequence,
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


def _attention(need: _Config, hidden: int) -> tuple[int, int, int, int]:
    """One layer's (parameters, numbers cached per token, read per token of context, read per sequence)."""
    heads = need("num_attention_heads")
    if not need.has("kv_lora_rank"):
        wide = need("head_dim", hidden // heads)
        pairs = need("num_key_value_heads", heads)
        cache = 2 * pairs * wide
        return hidden * wide * (2 * heads + 2 * pairs), cache, cache, 0
    latent, rope = need("kv_lora_rank"), need("qk_rope_head_dim")
    query, value = need("qk_nope_head_dim") + rope, need("v_head_dim")
    low_rank = need.has("q_lora_rank")
    parameters = need("q_lora_rank") * (hidden + heads * query) if low_rank else hidden * heads * query
    parameters += hidden * (latent + rope) + latent * heads * (query - rope + value) + heads * value * hidden
    cache = latent + rope
    if not need.has("index_topk"):
        return parameters, cache, cache, 0
    index = need("index_head_dim")
    return parameters, cache + index, index, need("index_topk") * cache
