"""Copies the model of a checkpoint out of a run folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from miles_contracts import InvalidFieldError
from miles_loop.checkpoint import list_checkpoints, read_checkpoint
from miles_loop.files import disk_errors, is_disk_full
from miles_loop.run_folder import RunFolder


def export_model(run: Path, target: Path, step: int | None = None) -> int:
    """Copy model and tokenizer of a checkpoint to `target`; returns the checkpoint's step.

    Args:
        run: the run folder.
        target: must not exist yet, or be an empty folder.
        step: which checkpoint, None for the newest.

    Raises:
        InvalidFieldError: no run, no such checkpoint, or the target is in use.
        RunError: the checkpoint is damaged.
        DiskFullError: no room; nothing is left behind.
    """
    folder = RunFolder(run)
    folder.read_config()
    found = dict(list_checkpoints(folder.checkpoints))
    if not found:
        raise InvalidFieldError("RUN", str(run), "it has no checkpoint; train with --checkpoint-every, or to the end")
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise InvalidFieldError("--step", chosen, f"there are checkpoints of steps {', '.join(map(str, found))}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidFieldError("FOLDER", str(target), "it exists and is not empty; name a new folder")
    read_checkpoint(found[chosen])  # verifies every byte
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_errors(target):
            try:
                temporary.mkdir(parents=True)
            except OSError as error:
                if is_disk_full(error):
                    raise
                raise InvalidFieldError("FOLDER", str(target), f"cannot be made: {error.strerror}") from error
            shutil.copytree(found[chosen] / "hf", temporary, dirs_exist_ok=True)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return chosen
