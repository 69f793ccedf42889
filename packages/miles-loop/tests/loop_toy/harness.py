"""Runs commands of the toy recipes as processes, and looks at what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


class Command:
    """A command of the toy recipe, run as a process of its own. Whatever is left of it is killed after the test."""

    def __init__(self, module: str, scratch: Path) -> None:
        self._module = module
        self._scratch = scratch
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        """Start it with plain output."""
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._scratch,
            env={**_environment(self._scratch), **environment},
        )
        self._running.append(process)
        return process

    def run(self, *arguments: object, status: int = 0, **environment: str) -> str:
        """Run it to its end; returns output and errors together."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == status, f"exit {process.returncode}\n{out}\n{err}"
        return out + err

    def close(self) -> None:
        """Kill what is left."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _environment(scratch: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "MILES_HOME": str(scratch / "home")}
    return environment


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Whole records of a file of the run folder."""
    file = run / name
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def without_clock(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on time, or on which engine served what."""
    return [{k: v for k, v in r.items() if k != "time" and not k.startswith(("perf/", "router/"))} for r in found]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds; fail after a while."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def wait_for_records(process: subprocess.Popen[str], run: Path, count: int, seconds: float = 60.0) -> None:
    """Wait until a run that is under way has so many records; fail with what it says when it does not get there."""
    deadline = time.monotonic() + seconds
    while len(records(run)) < count:
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.communicate()}")
        if time.monotonic() > deadline:
            process.kill()
            logs = "\n".join(f"{file.name}: {file.read_text()}" for file in sorted((run / "logs").glob("*.log")))
            raise AssertionError(f"{len(records(run))} records after {seconds:g} s\n{process.communicate()}\n{logs}")
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Ids of the direct children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == pid and stat[0] != "Z":
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def named_child(pid: int, name: str) -> int:
    """The child of `pid` whose command line holds `name`."""
    return next(c for c in children(pid) if name in Path(f"/proc/{c}/cmdline").read_text())
