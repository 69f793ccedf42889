"""Checkpoints that appear whole or not at all, and continue exactly.

    <directory>/hf/                     the model as `save_pretrained` writes it, with the tokenizer's files
    <directory>/optimizer.safetensors   `<kind>:<parameter>`: moments, step counts, float32 masters
    <directory>/trainer.json            version, RNG state, and size and BLAKE2 digest of every other file

Everything is written into a sibling folder first and renamed at the end. The schedule needs no state: it is a
function of the version.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_contracts import InvalidFieldError
from miles_trainer.errors import CheckpointError
from miles_trainer.export import Exporter
from miles_trainer.modeling import quiet_progress
from miles_trainer.optimizer import MasterAdamW

HF = "hf"
_OPTIMIZER = "optimizer.safetensors"
_META = "trainer.json"
_FORMAT = 1
_NOT_TOKENIZER = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files were verified.

    Attributes:
        version: optimiser updates in it.
        optimizer: what `MasterAdamW.state` gave.
        rng: generator states by device.
    """

    version: int
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]


def save(directory: Path, model: Any, optimizer: MasterAdamW, version: int, tokenizer_from: Path) -> None:
    """Write a checkpoint into `directory`, which must be new or empty.

    Raises:
        InvalidFieldError: `directory` already holds something.
        OSError: nothing is left behind under `directory`.
    """
    from safetensors.torch import save_file

    with _Atomic(directory) as folder:
        write_hf(folder / HF, model, tokenizer_from)
        save_file({k: v.detach().contiguous().cpu() for k, v in optimizer.state().items()}, folder / _OPTIMIZER)
        meta = {
            "format": _FORMAT,
            "version": version,
            "model": type(model).__name__,
            "rng": {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in _rng_states().items()},
            "files": {str(p.relative_to(folder)): _fingerprint(p) for p in sorted(folder.rglob("*")) if p.is_file()},
        }
        (folder / _META).write_text(json.dumps(meta, indent=1))


def export_hf(directory: Path, model: Any, tokenizer_from: Path) -> None:
    """Write the model as a Hugging Face folder, atomically; `directory` must be new or empty."""
    with _Atomic(directory) as folder:
        write_hf(folder, model, tokenizer_from)


def write_hf(folder: Path, model: Any, tokenizer_from: Path) -> None:
    """`save_pretrained` plus the small files of the source folder that it does not write (tokenizer, templates)."""
    with quiet_progress():
        model.save_pretrained(folder)
    for source in sorted(tokenizer_from.iterdir()):
        if source.is_file() and not source.name.endswith(_NOT_TOKENIZER) and not (folder / source.name).exists():
            shutil.copyfile(source, folder / source.name)


def read(directory: Path, model: Any) -> Saved:
    """Verify a checkpoint and read its small parts.

    Args:
        directory: the checkpoint.
        model: the present model, with which the saved one must agree.

    Raises:
        CheckpointError: a file is missing, damaged or of another format, or the model differs.
    """
    meta_path = directory / _META
    try:
        meta = json.loads(meta_path.read_text())
        files, version, form = dict(meta["files"]), int(meta["version"]), int(meta["format"])
        rng = {k: torch.from_numpy(_bytes(v)) for k, v in meta["rng"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{meta_path} is missing: {directory} is not a finished checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{meta_path} is damaged ({error}); use an older checkpoint") from error
    if form != _FORMAT:
        raise CheckpointError(f"{directory} has checkpoint format {form}, this code reads {_FORMAT}")
    for name, wanted in files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; use an older checkpoint")
        if _fingerprint(path) != wanted:
            raise CheckpointError(f"{path} is damaged (its digest differs); use an older checkpoint")
    _require_same_model(directory, model)
    from safetensors.torch import load_file

    return Saved(version=version, optimizer=load_file(directory / _OPTIMIZER), rng=rng)


def restore_optimizer(saved: Saved, optimizer: MasterAdamW) -> None:
    """Give the optimiser its state back.

    Raises:
        CheckpointError: the state belongs to other parameters.
    """
    try:
        optimizer.load_state(saved.optimizer)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"optimiser state does not fit the model: {error}") from error


def restore_rng(saved: Saved) -> None:
    """Put torch's generators where they were."""
    for device, state in saved.rng.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state, device)


def _require_same_model(directory: Path, model: Any) -> None:
    from safetensors import safe_open

    there: dict[str, tuple[int, ...]] = {}
    for path in sorted((directory / HF).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            there |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    here = {spec.name: spec.shape for spec in Exporter(model).specs}
    lines = [
        f"{name}: {here.get(name, 'absent')} here, {there.get(name, 'absent')} in the checkpoint"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if lines:
        more = f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise CheckpointError(f"{directory} is of another model:\n  " + "\n  ".join(lines[:10]) + more)


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().cpu()
    return states


def _bytes(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8).copy()


def _fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return f"{path.stat().st_size}:{digest.hexdigest()}"


class _Atomic:
    """A folder that gets its name only when the block ends without an error."""

    def __init__(self, directory: Path) -> None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InvalidFieldError("directory", str(directory), "give a folder that is new or empty")
        self.target = directory
        self.work = directory.parent / f".{directory.name}.partial-{os.getpid()}"

    def __enter__(self) -> Path:
        for left_over in self.target.parent.glob(f".{self.target.name}.partial-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        self.work.mkdir(parents=True)
        return self.work

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.work, ignore_errors=True)
            return
        try:
            for path in self.work.rglob("*"):
                _sync(path)
            _sync(self.work)
            self.work.replace(self.target)
        except OSError:
            shutil.rmtree(self.work, ignore_errors=True)
            raise
        _sync(self.target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
