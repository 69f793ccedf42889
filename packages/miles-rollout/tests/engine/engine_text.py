"""A tokenizer for tests: one word a token, `w0` .. `wN`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def save_tokenizer(folder: Path, size: int) -> Tokenizer:
    """Write tokenizer.json with `size` words and return the tokenizer."""
    vocabulary = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
