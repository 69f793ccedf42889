"""A checkpoint is complete or it is not there.

    checkpoints/step_000010/
        hf/               model and tokenizer for `transformers.from_pretrained`
        ...               optimiser, schedule and random state (the trainer's files)
        loop.mls          everything the driver has to remember (`LoopState`)
        checkpoint.json   step, and size and digest of every file: written last

It is written under another name, made durable, and renamed. After that rename, and not before, the run is at this
step: what happened later is repeated by a resumed run from the same state.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, WireError, digest, wire
from miles_loop.errors import RunError
from miles_loop.files import disk_errors, in_thread, remove_tree, sync_file, write_atomic, write_json
from miles_rollout.worker import WorkerState

_NAME = re.compile(r"step_(\d{6,})")


class LoopState(msgspec.Struct, frozen=True, kw_only=True, tag="loop_state", eq=False):
    """What the driver remembers between steps.

    Attributes:
        step: optimiser steps done; also the version of the weights.
        rollout: state of the rollout half: position in the data stream, prompts in flight, finished groups.
        records: state of the token audit for the finished groups.
        counters: totals since the start of the run.
    """

    step: int
    rollout: WorkerState
    records: dict[str, list[Any]]
    counters: dict[str, float]


def checkpoint_name(step: int) -> str:
    """Name of a step's checkpoint folder."""
    return f"step_{step:06d}"


async def write_checkpoint(
    folder: Path, state: LoopState, save_trainer: Callable[[Path], Awaitable[None]], keep: int
) -> Path:
    """Write the checkpoint of `state.step`, then remove all but the newest `keep`.

    Args:
        folder: the run's checkpoint folder.
        state: the driver's part; taken before this call, so that both parts are of the same moment.
        save_trainer: writes the trainer's part into a directory.
        keep: how many checkpoints stay.

    Raises:
        DiskFullError: no room; earlier checkpoints are untouched and the unfinished one is removed.
    """
    final = folder / checkpoint_name(state.step)
    temporary = folder / f".tmp-{final.name}"
    clean(folder)
    try:
        with disk_errors(temporary):
            os.mkdir(temporary)
            await save_trainer(temporary)
            await in_thread(_commit, temporary, final, state)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    await in_thread(_remove_old, folder, keep)
    return final


def _commit(temporary: Path, final: Path, state: LoopState) -> None:
    write_atomic(temporary / "loop.mls", wire.encode(state))
    write_json(temporary / "checkpoint.json", {"step": state.step, "files": _seal(temporary)}, durable=True)
    sync_file(temporary)
    remove_tree(final)  # left by a run that was resumed from an earlier step
    os.replace(temporary, final)
    sync_file(final.parent)


def _remove_old(folder: Path, keep: int) -> None:
    for _, old in list_checkpoints(folder)[:-keep]:
        remove_tree(old)


def _seal(directory: Path) -> dict[str, Any]:
    """Make every file durable; returns size and digest by relative path."""
    files: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        sync_file(path)
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, "digest": file_digest(path)}
    return files


def file_digest(path: Path) -> str:
    """Digest of a file's content, read by mapping it."""
    if path.stat().st_size == 0:
        return digest(b"")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return digest(view)


def clean(folder: Path) -> None:
    """Remove what a killed run left half written or half deleted."""
    for pattern in (".tmp-*", ".trash-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if (path / "checkpoint.json").is_file())


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, None when there is none."""
    found = list_checkpoints(folder)
    return found[-1][1] if found else None


def read_checkpoint(path: Path) -> LoopState:
    """Verify every file of a checkpoint and read the driver's part.

    Raises:
        RunError: a file is missing or differs from what was written; the message names it.
        InvalidFieldError: not a checkpoint.
    """
    try:
        seal = json.loads((path / "checkpoint.json").read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidFieldError("checkpoint", str(path), f"not a checkpoint: {error}") from error
    for name, expected in seal["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != expected["bytes"] or file_digest(file) != expected["digest"]:
            raise RunError(
                "damaged_checkpoint",
                f"{file} is not what was written; remove {path} to continue from the checkpoint before it",
            )
    try:
        return wire.decode((path / "loop.mls").read_bytes(), LoopState)
    except WireError as error:
        raise RunError("damaged_checkpoint", f"{path / 'loop.mls'}: {error}") from error
