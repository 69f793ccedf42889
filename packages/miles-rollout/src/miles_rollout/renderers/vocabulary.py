"""Text to ids and back, with control tokens under the renderer's control and never under the text's.

A `tokenizers` tokenizer looks for its added tokens ("<|im_end|>", "<think>", ...) in whatever it is given. Here that
search is switched off and done by `Vocabulary.split` instead, so that a renderer decides which added tokens a piece of
text may contain: a tool result that spells "<|im_end|>" stays text and cannot end its own turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_contracts import InvalidFieldError

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary:
    """The tokenizer of a model folder.

    Attributes:
        added: id of every added token by its text.
        special: texts of the added tokens that the tokenizer itself marks as special.
        size: one more than the largest id (a model's embedding may be padded to more rows).
    """

    def __init__(self, definition: dict[str, Any]) -> None:
        """Takes the parsed `tokenizer.json`; the argument is changed and must not be used afterwards."""
        tokens: list[dict[str, Any]] = definition.get("added_tokens") or []
        self.added: dict[str, int] = {t["content"]: int(t["id"]) for t in tokens}
        self.special = frozenset(t["content"] for t in tokens if t.get("special"))
        self._flags = {t["content"]: t for t in tokens}
        self._text_of = {i: text for text, i in self.added.items()}
        self._patterns: dict[frozenset[str], re.Pattern[str] | None] = {}
        for token in tokens:  # so that `encode_special_tokens` below switches off the search for all of them
            token["special"] = True
        self._first = _load(definition)
        self._rest = self._first
        if _set_prepend_scheme(definition.get("pre_tokenizer"), "first", "never"):
            self._rest = _load(definition)
        largest = max(self._first.get_vocab(with_added_tokens=True).values(), default=-1)
        self.size = largest + 1

    @classmethod
    def from_folder(cls, path: Path) -> Vocabulary:
        """Reads `tokenizer.json`, and the added tokens that only `tokenizer_config.json` declares.

        Raises:
            InvalidFieldError: no `tokenizer.json`, or it is not a tokenizer.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise InvalidFieldError(
                "model_path", str(path), "needs a tokenizer.json; save the model's fast tokenizer into that folder"
            )
        try:
            definition = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise InvalidFieldError("tokenizer.json", str(file), f"must be JSON text ({error})") from error
        if not isinstance(definition, dict) or "model" not in definition:
            raise InvalidFieldError("tokenizer.json", str(file), 'must be a tokenizer with a "model" entry')
        _add_declared_tokens(definition, path / "tokenizer_config.json")
        return cls(definition)

    def id(self, token: str) -> int:
        """The id of an added token.

        Raises:
            InvalidFieldError: the tokenizer has no such added token.
        """
        found = self.added.get(token)
        if found is None:
            raise InvalidFieldError(
                "tokenizer", token, "is not an added token of this tokenizer; choose another renderer family"
            )
        return found

    def is_added(self, token_id: int) -> bool:
        """True when the id is an added token, across which no merge can reach."""
        return token_id in self._text_of

    def is_byte(self, token_id: int) -> bool:
        """True for a byte of a character that has no token of its own ("<0xE4>" of a byte-fallback tokenizer)."""
        known = 0 <= token_id < self.size
        return known and _BYTE.fullmatch(self._first.id_to_token(token_id) or "") is not None

    def text_of(self, token_id: int) -> str:
        """The text of one token, for reports."""
        return self._text_of[token_id] if token_id in self._text_of else self.decode([token_id])

    def encode(self, text: str, *, at_start: bool = False) -> list[int]:
        """Ids of plain text in which no added token is looked for.

        Args:
            text: the text between two added tokens.
            at_start: the text begins the whole sequence (some tokenizers put a space before the first word only).
        """
        if not text:
            return []
        tokenizer = self._first if at_start else self._rest
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def split(self, text: str, recognised: frozenset[str] | None = None) -> Iterator[int | str]:
        """Cuts text at added tokens (leftmost, longest first): ids for tokens, strings for what lies between.

        Args:
            text: any text.
            recognised: which added tokens to look for; all of them when None.
        """
        pattern = self._pattern(frozenset(self.added) if recognised is None else recognised)
        if pattern is None:
            if text:
                yield text
            return
        at = 0
        for match in pattern.finditer(text):
            if match.start() > at:
                yield text[at : match.start()]
            # A token that strips the white space around it matched more than its own text.
            name = match.group()
            yield self.added[name if name in self.added else name.strip()]
            at = match.end()
        if at < len(text):
            yield text[at:]

    def decode(self, token_ids: Sequence[int], *, skip: Iterable[int] = ()) -> str:
        """Text of ids, without those in `skip`.

        Raises:
            InvalidFieldError: an id is outside the vocabulary.
        """
        skipped = frozenset(skip)
        ids = [i for i in token_ids if i not in skipped] if skipped else list(token_ids)
        for i in ids:
            if not 0 <= i < self.size:
                raise InvalidFieldError("token_ids", i, f"must be in [0, {self.size}), the size of the vocabulary")
        return str(self._first.decode(ids, skip_special_tokens=False))

    def _pattern(self, recognised: frozenset[str]) -> re.Pattern[str] | None:
        if recognised not in self._patterns:
            names = sorted(recognised & self.added.keys(), key=lambda t: (-len(t), t))
            alternatives = (_alternative(self._flags[name]) for name in names)
            self._patterns[recognised] = re.compile("|".join(alternatives)) if names else None
        return self._patterns[recognised]


def _load(definition: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidFieldError("tokenizer.json", str(error), "must be readable by the tokenizers package") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _alternative(token: dict[str, Any]) -> str:
    pattern = re.escape(str(token["content"]))
    if token.get("single_word"):
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return (r"\s*" if token.get("lstrip") else "") + pattern + (r"\s*" if token.get("rstrip") else "")


def _set_prepend_scheme(pre_tokenizer: Any, old: str, new: str) -> bool:
    """Changes the scheme of every Metaspace inside; True when there was one to change."""
    if not isinstance(pre_tokenizer, dict):
        return False
    changed = False
    if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") == old:
        pre_tokenizer["prepend_scheme"] = new
        changed = True
    for child in pre_tokenizer.get("pretokenizers") or ():
        changed = _set_prepend_scheme(child, old, new) or changed
    return changed


def _add_declared_tokens(definition: dict[str, Any], config_file: Path) -> None:
    """Adds tokens that `tokenizer_config.json` declares and `tokenizer.json` lacks, as Hugging Face does on load."""
    if not config_file.is_file():
        return
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidFieldError("tokenizer_config.json", str(config_file), f"must be JSON text ({error})") from error
    declared = config.get("added_tokens_decoder") or {}
    tokens = definition.setdefault("added_tokens", [])
    known = {int(t["id"]) for t in tokens}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for key, value in declared.items():
        if int(key) not in known:
            tokens.append({"id": int(key), "content": value["content"]} | {f: bool(value.get(f, False)) for f in flags})
    tokens.sort(key=lambda t: int(t["id"]))
