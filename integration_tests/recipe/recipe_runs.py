"""Runs the installed commands as a user does, and looks at what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SMALL = ("--rollout.groups_per_step", 2, "--rollout.group_size", 4, "--task.eval_size", 8, "--rollout.filter", "none")
"""Options that make a step of the recipe's own tasks cheap, and every group count."""


class Shell:
    """Runs commands in a scratch folder; whatever is left of them is killed at the end of the test."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._running: list[subprocess.Popen[str]] = []
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.environment = kept | {
            "OMP_NUM_THREADS": "1",
            "MILES_HOME": str(scratch / "home"),
            "PATH": f"{BIN}{os.pathsep}{kept.get('PATH', '')}",
            "PYTHONPATH": str(scratch),
        }

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command."""
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._scratch,
            env=self.environment,
        )
        self._running.append(process)
        return process

    def run(self, *words: object, status: int = 0, timeout: float = 240) -> str:
        """Run a command to its end; returns output and errors together."""
        return "".join(self._finished(*words, status=status, timeout=timeout))

    def run_json(self, *words: object) -> Any:
        """Run a command to its end; returns its output, JSON. On a busy machine it also says what it waits for."""
        return json.loads(self._finished(*words, status=0, timeout=240)[0])

    def _finished(self, *words: object, status: int, timeout: float) -> tuple[str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == status, f"exit {process.returncode}\n{out}\n{err}"
        return out, err

    def close(self) -> None:
        """Kill what is left."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def start_engine(shell: Shell, model: Path, port: int = 0) -> tuple[str, subprocess.Popen[str]]:
    """An embedded engine that somebody else than the run has started: its URL and its process."""
    options = ("--model-path", model, "--port", port)
    process = shell.start(sys.executable, "-m", "miles_rollout.engine", *options)
    assert process.stdout is not None
    for line in process.stdout:
        if "ready: " in line:
            return line.split("ready: ")[1].split()[0], process
    raise AssertionError(f"the engine ended: {process.communicate()}")


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Whole records of a file of a run folder."""
    file = run / name
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def without_clock(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on time, or on which engine served what."""
    return [{k: v for k, v in r.items() if k != "time" and not k.startswith(("perf/", "router/"))} for r in found]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds; fail when the process ends first, or after so long that no load explains it."""
    deadline = time.monotonic() + 280
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def descendants(pid: int) -> dict[int, str]:
    """Command line by id of every living process below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found, frontier = {}, {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        for child in frontier:
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
