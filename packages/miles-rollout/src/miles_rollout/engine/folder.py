"""Checks of a model folder that need no heavy import, so that a wrong path is told at once."""

from __future__ import annotations

import json
from pathlib import Path

from miles_contracts import InvalidFieldError

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def check_model_folder(path: Path, field: str = "model_path") -> None:
    """Raise InvalidFieldError unless `path` is a folder with a readable config.json and weight files."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise InvalidFieldError(field, str(path), f"it {what}; give a Hugging Face model folder")
    config = path / "config.json"
    if not config.is_file():
        raise InvalidFieldError(field, str(path), "it has no config.json; give a Hugging Face model folder")
    try:
        json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise InvalidFieldError(field, str(config), f"it cannot be read: {error}") from error
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise InvalidFieldError(field, str(path), f"it has no weights ({' or '.join(WEIGHT_FILES)})")
