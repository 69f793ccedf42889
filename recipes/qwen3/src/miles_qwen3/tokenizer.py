"""The tokenizer of the recipe's own models: bytes, four role names and the control tokens of Qwen3's chat format.

Any text can be written (a byte that is no part of a longer token is a token of its own), and the vocabulary is small
enough that a model of 0.1 M parameters, which starts at random, meets every token while it explores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_END)
"""Control tokens that decoding leaves out: they end an answer."""
MARKUP = (TURN_START, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that show in decoded text. Qwen3 hides the start of a turn as well; here an answer that contains one
must look wrong, or a policy that starts at random learns to pad its answers with tokens that no reward can see."""
WORDS = ("user", "assistant", "system", "tool")
"""Written with one token, so that the frame of a message costs few tokens."""


def make_tokenizer(phrases: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE whose only merges spell the role names.

    Args:
        phrases: texts that get a token of their own wherever they occur, as frequent ones have in a large vocabulary.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocabulary:
                vocabulary[word[:length]] = len(vocabulary)
                merges.append((word[: length - 1], word[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKUP, *phrases)])
    return tokenizer


def write_tokenizer(directory: Path, phrases: Sequence[str] = ()) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a model folder."""
    tokenizer = make_tokenizer(phrases)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    template = resources.files("miles_qwen3").joinpath("data", "chat_template.jinja").read_text("utf-8")
    (directory / "chat_template.jinja").write_text(template)
    return tokenizer
