"""Small Qwen3 models made from a configuration: random weights, tokenizer and chat template, without torch.

`build_tiny` and `build_moe` write a Hugging Face folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from miles_qwen3.tokenizer import END_OF_TEXT, TURN_END, write_tokenizer
from miles_qwen3.trail import AFTER, BEFORE, TOOLS
from miles_rollout.renderers.families.chatml import TOOLS_AFTER, TOOLS_BEFORE
from miles_rollout.renderers.jsontext import to_json

INITIAL_STD = 0.05
"""Standard deviation of all matrices. Larger than the 0.02 of wide models: at 64 hidden units, 0.02 leaves every logit
so close to 0 that the first hundred updates only scale them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 model; `experts` 0 is the dense form.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        inner: width of the feed-forward layer (dense form) or of one expert.
        experts: experts per layer.
        experts_per_token: experts that each token uses.
        context: longest sequence in tokens.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 128
    experts: int = 0
    experts_per_token: int = 0
    context: int = 512


TINY = Shape()
MOE = Shape(inner=64, experts=8, experts_per_token=2)
PHRASES = (BEFORE, AFTER, *map(to_json, TOOLS), TOOLS_BEFORE, TOOLS_AFTER)
"""What occurs in every trail game. With a token each, the declaration of the tool costs three tokens instead of 700 and
a call three instead of 50: few enough that a model that starts at random comes upon one by itself."""
COPYING_STD, COPYING_NOISE = 0.1, 0.01
"""Standard deviations of `copying`: of the embedding, and of what is added to the output projections."""


def build_tiny(directory: Path, seed: int) -> None:
    """Write the dense model: 2 layers, 64 hidden, about 0.1 M parameters."""
    write_model(directory, TINY, seed)


def build_moe(directory: Path, seed: int) -> None:
    """Write the mixture-of-experts model: as the dense one, with 8 experts of which a token uses 2."""
    write_model(directory, MOE, seed)


def build_tiny_tools(directory: Path, seed: int) -> None:
    """Write the dense model with a vocabulary in which the frame of a tool call, and what declares it, is short."""
    write_model(directory, TINY, seed, PHRASES, copying=True)


def write_model(
    directory: Path, shape: Shape, seed: int, phrases: Sequence[str] = (), *, copying: bool = False
) -> None:
    """Write a whole model folder; the same arguments give the same bytes.

    Args:
        directory: an existing folder.
        shape: sizes of the model.
        seed: of the random weights.
        phrases: see `make_tokenizer`.
        copying: see `copying_attention`.
    """
    tokenizer = write_tokenizer(directory, phrases)
    ids = tokenizer.get_vocab()
    end_of_text, turn_end, vocabulary = ids[END_OF_TEXT], ids[TURN_END], len(ids)
    _write_json(directory / "config.json", model_config(shape, vocabulary, end_of_text, turn_end))
    stops = {"eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text}
    _write_json(directory / "generation_config.json", stops)
    random = np.random.default_rng(seed)
    tensors = {name: _initial(random, size) for name, size in tensor_shapes(shape, vocabulary)}
    if copying:
        tensors |= copying_attention(random, shape)
        tensors["model.embed_tokens.weight"] *= np.float32(COPYING_STD / INITIAL_STD)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def model_config(shape: Shape, vocabulary: int, end_of_text: int, turn_end: int) -> dict[str, Any]:
    """`config.json` of the model."""
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.inner,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "initializer_range": INITIAL_STD,
        "max_position_embeddings": shape.context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        # as in the real family: small dense models share input and output embedding, mixtures do not
        "tie_word_embeddings": not shape.experts,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
        "dtype": "float32",
        **(moe if shape.experts else {}),
    }


def tensor_shapes(shape: Shape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(canonical name, sizes) of every tensor, in a fixed order; mixtures have an output embedding of their own."""
    yield "model.embed_tokens.weight", (vocabulary, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (shape.heads * shape.head_dim, shape.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (shape.kv_heads * shape.head_dim, shape.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (shape.kv_heads * shape.head_dim, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, shape.heads * shape.head_dim)
        yield f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        if shape.experts:
            yield f"{prefix}.mlp.gate.weight", (shape.experts, shape.hidden)
        for part in [f"mlp.experts.{i}" for i in range(shape.experts)] or ["mlp"]:
            yield f"{prefix}.{part}.gate_proj.weight", (shape.inner, shape.hidden)
            yield f"{prefix}.{part}.up_proj.weight", (shape.inner, shape.hidden)
            yield f"{prefix}.{part}.down_proj.weight", (shape.hidden, shape.inner)
    yield "model.norm.weight", (shape.hidden,)
    if shape.experts:
        yield "lm_head.weight", (vocabulary, shape.hidden)


def copying_attention(random: np.random.Generator, shape: Shape) -> dict[str, NDArray[np.float32]]:
    """Value and output projections with which attention hands on what it reads, by tensor name.

    Output is the transpose of value (orthonormal rows), so a layer adds the mean of the tokens it attends to, seen
    through half of the dimensions. With tied embeddings that makes what stands in the context a little likelier than
    what does not, whatever it is: a policy that starts at random then has a way to repeat a note before it has found
    out about each single one, as pretrained models have.
    """
    group, width = shape.heads // shape.kv_heads, shape.kv_heads * shape.head_dim
    tensors = {}
    for layer in range(shape.layers):
        basis, _ = np.linalg.qr(random.normal(size=(shape.hidden, width)))
        per_head = np.split(basis, shape.kv_heads, axis=1)
        output = np.concatenate([part for part in per_head for _ in range(group)], axis=1) / group
        noise = random.normal(0.0, COPYING_NOISE, output.shape)
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.v_proj.weight"] = np.ascontiguousarray(basis.T, np.float32)
        tensors[f"{prefix}.o_proj.weight"] = np.ascontiguousarray(output + noise, np.float32)
    return tensors


def _initial(random: np.random.Generator, size: tuple[int, ...]) -> NDArray[np.float32]:
    """Ones for a norm (the only vectors), normal values for a matrix."""
    if len(size) == 1:
        return np.ones(size, np.float32)
    return random.normal(0.0, INITIAL_STD, size).astype(np.float32)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
