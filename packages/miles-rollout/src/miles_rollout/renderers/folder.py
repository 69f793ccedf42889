"""What a model folder says about itself: its chat template, its stop tokens, its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError
from miles_rollout.renderers.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The small files of a model folder, read once.

    Attributes:
        path: the folder.
        vocabulary: its tokenizer.
        model_type: `model_type` of config.json, or "".
        chat_template: the default chat template, or None.
        named_tokens: bos_token, eos_token, ... as templates see them.
        eos_tokens: every token that ends a generation, by text (generation_config.json, config.json,
            tokenizer_config.json; each may name one or several).
    """

    path: Path
    vocabulary: Vocabulary
    model_type: str
    chat_template: str | None
    named_tokens: Mapping[str, str]
    eos_tokens: tuple[str, ...]


def read_folder(path: Path) -> ModelFolder:
    """Reads a model or tokenizer folder; only `tokenizer.json` is required.

    Raises:
        InvalidFieldError: the folder or its tokenizer is missing, or a file in it is not what its name says.
    """
    if not path.is_dir():
        raise InvalidFieldError("model_path", str(path), "must be a folder with a tokenizer.json")
    vocabulary = Vocabulary.from_folder(path)
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    config = _read_json(path / "config.json")
    named = {key: _token_text(value) for key, value in tokenizer_config.items() if key.endswith("_token")}
    named_tokens = {key: text for key, text in named.items() if text is not None}
    eos = [named_tokens["eos_token"]] if "eos_token" in named_tokens else []
    for source in (_read_json(path / "generation_config.json"), config):
        eos += _eos_texts(source.get("eos_token_id"), vocabulary)
    return ModelFolder(
        path=path,
        vocabulary=vocabulary,
        model_type=str(config.get("model_type") or ""),
        chat_template=_chat_template(path, tokenizer_config),
        named_tokens=named_tokens,
        eos_tokens=tuple(dict.fromkeys(t for t in eos if t in vocabulary.added)),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidFieldError(file.name, str(file), f"must be JSON text ({error})") from error
    if not isinstance(value, dict):
        raise InvalidFieldError(file.name, str(file), "must be a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_texts(value: Any, vocabulary: Vocabulary) -> list[str]:
    ids = value if isinstance(value, list) else [value]
    return [vocabulary.text_of(i) for i in ids if isinstance(i, int) and vocabulary.is_added(i)]


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
