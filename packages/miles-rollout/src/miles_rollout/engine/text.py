"""Text in and out of the engine: encoding prompts, decoding outputs, finding stop strings."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from miles_contracts import InvalidFieldError
from miles_rollout.engine.sequence import Finish, Sequence

_CHARS_PER_TOKEN = 1
"""A token is at least one character, so a stop string of n characters lies within the last n tokens ..."""
_SLACK = 4
"""... plus a few that complete a character of several bytes."""


class TextCodec:
    """The model's tokenizer.

    Attributes:
        available: whether the folder had a tokenizer.json; without it only token ids go in and out.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None

    @property
    def available(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds."""
        return list(self._need("text").encode(text).ids)

    def require(self, field: str) -> None:
        """Raise InvalidFieldError naming `field` when there is no tokenizer."""
        self._need(field)

    def _need(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidFieldError(field, "text", f"{self._folder} has no tokenizer.json; use token ids")
        return self._tokenizer

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def check_stop(self, sequence: Sequence) -> None:
        """Finish a sequence whose text now contains one of its stop strings."""
        stops = sequence.sampling.stop
        window = max(len(s) for s in stops) // _CHARS_PER_TOKEN + _SLACK
        tail = sequence.tokens[max(sequence.prompt_length, sequence.length - window) : sequence.length]
        text = self.decode(tail.tolist(), skip_special_tokens=False)
        found = [(text.find(s), s) for s in stops if s in text]
        if found:
            sequence.finish = Finish("stop", min(found)[1])

    def output_text(self, sequence: Sequence) -> str:
        """Text of the new tokens, without what ended it (unless `no_stop_trim`)."""
        if self._tokenizer is None:
            return ""
        sampling, finish, ids = sequence.sampling, sequence.finish, sequence.output_ids
        trim = finish is not None and finish.kind == "stop" and not sampling.no_stop_trim
        if trim and finish is not None and isinstance(finish.detail, int):
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        if trim and finish is not None and isinstance(finish.detail, str):
            at = text.find(finish.detail)
            text = text[:at] if at >= 0 else text
        return text
