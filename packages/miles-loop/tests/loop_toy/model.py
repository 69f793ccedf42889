"""A model small enough for tests, made without torch: random Qwen3 weights, byte tokens, a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 1, 32, 2, 1, 16, 64, 256


def build(directory: Path, seed: int) -> None:
    """Write the Hugging Face folder; `ModelPreset.build` of the test recipe."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    _json(directory / "config.json", config)
    _json(directory / "generation_config.json", {"eos_token_id": eos})
    _json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    save_file(weights(vocabulary, seed), directory / "model.safetensors", metadata={"format": "pt"})


def make_tokenizer() -> Tokenizer:
    """Bytes and three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def weights(vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """Normal(0, 0.05) matrices and unit norms under Qwen3's names."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, 0.05, (rows, columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            prefix + "self_attn.q_norm.weight": np.ones(HEAD_DIM, np.float32),
            prefix + "self_attn.k_norm.weight": np.ones(HEAD_DIM, np.float32),
            prefix + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return tensors


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2))
