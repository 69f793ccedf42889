"""The run folder: where everything of a run is, readable while it runs and after it died.

    config.toml            the effective configuration
    run.json               what made it: recipe, versions of the packages, when it was started and resumed
    status.json            how far it is; replaced as a whole after every step
    metrics.jsonl          one record a step
    ledger.jsonl           one record a step: which prompts were trained, by their position in the stream
    trajectories/          some groups of every step, as wire frames
    checkpoints/step_N/    complete states to continue from (see `miles_loop.checkpoint`)
    logs/                  what the processes wrote
    summary.json, reward.png   written at the end
    lost-DATE-TIME/        records of steps that a resume had no checkpoint of

One process owns a folder at a time; readers need no permission and no lock.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import Group, InvalidFieldError, wire
from miles_loop.config import RunConfig
from miles_loop.files import disk_errors, remove_tree, write_atomic, write_json
from miles_loop.options import build
from miles_loop.toml import dumps

RESERVE_BYTES = 256 * 1024
"""Size of a file that is deleted when the disk is full, so that status and summary can still be written."""


LOCK = ".lock"
"""File that the owner of a folder holds a lock on."""
PACKAGES = ("miles-contracts", "miles-rollout", "miles-trainer", "miles-sync", "miles-loop", "torch", "transformers")
"""Whose versions a run notes down."""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def config_file(self) -> Path:
        """The effective configuration."""
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def ledger_file(self) -> Path:
        """Trained prompts, one JSON object a step."""
        return self.path / "ledger.jsonl"

    @property
    def status_file(self) -> Path:
        """How far the run is."""
        return self.path / "status.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    @property
    def trajectories(self) -> Path:
        """Folder of recorded groups."""
        return self.path / "trajectories"

    @property
    def snapshots(self) -> Path:
        """Weights that are being measured beside training."""
        return self.path / "snapshots"

    @property
    def model(self) -> Path:
        """The initial model, when the recipe made one for this run."""
        return self.path / "model"

    def require_new(self) -> None:
        """Refuse a place where something is, so that no file of somebody else is ever mixed into a run.

        Raises:
            InvalidFieldError: a run is there, or anything else.
        """
        if self.config_file.exists():
            if self.unused:
                return
            raise InvalidFieldError(
                "run_dir", str(self.path), "a run is there; continue it with --resume, or name another folder"
            )
        if self.path.is_dir() and any(entry.name != LOCK for entry in self.path.iterdir()):
            raise InvalidFieldError("run_dir", str(self.path), "the folder is not empty; name another one")

    def create(self, config: RunConfig) -> None:
        """Make and own a new run's folder.

        Raises:
            InvalidFieldError: something is there already, somebody else makes a run there, or it cannot be made.
            DiskFullError: no room.
        """
        self.require_new()
        try:
            with disk_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidFieldError("run_dir", str(self.path), f"cannot be made: {error.strerror}") from error
        self.lock()
        try:
            self.require_new()  # nobody else can make one now, but somebody may have while we waited
        except InvalidFieldError:
            self.unlock()
            raise
        with disk_errors(self.path):
            self._clear()
        self.prepare(config)

    @property
    def unused(self) -> bool:
        """True when the run in the folder failed before its first step: there is nothing to continue or to keep."""
        if self.read_status().get("status") != "failed" or any(self.checkpoints.glob("step_*")):
            return False
        return not any(record["step"] for record in read_jsonl(self.metrics_file))

    def _clear(self) -> None:
        """Remove what a run that failed before its first step has left, its logs and `run.json` excepted."""
        for folder in (self.model, self.snapshots, self.checkpoints, self.trajectories):
            if folder.is_dir():
                remove_tree(folder)
        for file in (self.config_file, self.metrics_file, self.ledger_file, self.status_file):
            file.unlink(missing_ok=True)
        for name in ("summary.json", "reward.png"):
            (self.path / name).unlink(missing_ok=True)

    def set_records_aside(self) -> Path:
        """Move metrics, ledger and trajectories into a folder of their own, named after this second; returns it."""
        with disk_errors(self.path):
            kept = self.path / f"lost-{time.strftime('%Y%m%d-%H%M%S')}"
            while kept.exists():
                kept = kept.with_name(f"{kept.name}x")
            kept.mkdir()
            for entry in (self.metrics_file, self.ledger_file, self.trajectories):
                if entry.exists():
                    os.replace(entry, kept / entry.name)
        return kept

    def prepare(self, config: RunConfig) -> None:
        """Make what is missing and store the configuration."""
        with disk_errors(self.path):
            for folder in (self.checkpoints, self.logs, self.trajectories):
                folder.mkdir(exist_ok=True)
            write_atomic(self.config_file, dumps(config).encode())
            write_json(self.path / "run.json", self._provenance(config))
            reserve = self.path / ".reserve"
            if not reserve.exists():
                reserve.write_bytes(bytes(RESERVE_BYTES))

    def _provenance(self, config: RunConfig) -> dict[str, Any]:
        """What `run.json` holds; every start of the run is added."""
        try:
            starts = json.loads((self.path / "run.json").read_text("utf-8"))["starts"]
        except (OSError, ValueError, KeyError):
            starts = []
        return {
            "recipe": config.recipe,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "starts": [*starts, {"time": time.time(), "command": sys.argv}],
        }

    def release_reserve(self) -> None:
        """Make a little room on a full disk."""
        (self.path / ".reserve").unlink(missing_ok=True)

    def lock(self) -> None:
        """Own the folder until this process ends or `unlock`.

        Raises:
            InvalidFieldError: another process owns it, or nobody may write there.
        """
        try:
            descriptor = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InvalidFieldError("run_dir", str(self.path), f"cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InvalidFieldError(
                "run_dir", str(self.path), "another process runs in this folder; wait for it or end it"
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def in_use(self) -> bool:
        """True while some process owns the folder."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def read_config(self) -> RunConfig:
        """The stored configuration.

        Raises:
            InvalidFieldError: there is no run in the folder, or its configuration is damaged.
        """
        try:
            layer = tomllib.loads(self.config_file.read_text("utf-8"))
        except OSError as error:
            raise InvalidFieldError("RUN", str(self.path), f"no run there: {error.strerror}: config.toml") from error
        except tomllib.TOMLDecodeError as error:
            raise InvalidFieldError("RUN", str(self.config_file), f"damaged: {error}") from error
        return build(RunConfig, [layer])

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace the status."""
        write_json(self.status_file, status)

    def read_status(self) -> dict[str, Any]:
        """The last status; empty when the run never got that far."""
        try:
            status: dict[str, Any] = json.loads(self.status_file.read_text("utf-8"))
        except (OSError, json.JSONDecodeError):
            return {}
        return status


class JsonlWriter:
    """Appends records to a file of JSON objects, one a line.

    A record that could not be written whole (the disk is full, the process was killed) leaves at most a torn last
    line: `read_jsonl` skips it and `truncate_jsonl` removes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            DiskFullError: no room; the record is not there.
        """
        line = msgspec.json.encode(record) + b"\n"
        start = self._file.tell()
        with disk_errors(self._path):
            try:
                written = self._file.write(line)
                while written < len(line):  # a nearly full disk takes a part first and refuses the rest
                    written += self._file.write(line[written:])
            except OSError:
                with suppress(OSError):
                    self._file.truncate(start)
                raise

    def sync(self) -> None:
        """Make all records survive a power cut."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a file; a torn last line is left out, and so is a file that is not there."""
    if not path.is_file():  # also what can be read without end, such as a device
        return
    data = path.read_bytes()
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n") and line.strip():
            yield json.loads(line)


def truncate_jsonl(path: Path, last_step: int) -> int:
    """Remove the records after step `last_step` (and a torn line); returns how many were removed."""
    kept: list[bytes] = []
    removed = 0
    if not path.exists():
        return 0
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:
            kept.append(line)
        else:
            removed += 1
    if removed:
        write_atomic(path, b"".join(kept))
    return removed


class TrajectoryRecorder:
    """Writes some groups of every step as wire frames, within a budget of bytes."""

    def __init__(self, folder: Path, groups_per_step: int, budget_bytes: int) -> None:
        self._folder = folder
        self._groups = groups_per_step
        self._left = budget_bytes - sum(f.stat().st_size for f in folder.glob("*.mls"))

    def write(self, step: int, groups: list[Group]) -> None:
        """Record the first groups of a step.

        Raises:
            DiskFullError: no room.
        """
        if not self._groups or self._left <= 0:
            return
        # In parts: joining them would hold the interpreter's lock, and with it the event loop, for all of their bytes.
        frame = wire.encode_parts(groups[: self._groups])
        self._left -= sum(len(part) for part in frame)
        if self._left >= 0:
            write_atomic(self._folder / f"step_{step:06d}.mls", frame)


def default_run_dir(recipe: str) -> Path:
    """`runs/<recipe>-<date>-<time>`."""
    return Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
