"""Checks that a machine can run what is installed on it; every finding says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Verdict(StrEnum):
    """How serious a finding is."""

    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. `remedy` is empty when all is well."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def check_python() -> Finding:
    """The interpreter."""
    found = f"{platform.python_implementation()} {platform.python_version()}"
    return Finding("python", Verdict.GOOD, found)


def check_packages() -> Finding:
    """The packages that every run needs."""
    needed = ("torch", "transformers", "tokenizers", "safetensors", "aiohttp", "xxhash")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("packages", Verdict.BAD, f"missing: {', '.join(missing)}", "pip install miles-loop again")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return Finding("packages", Verdict.GOOD, versions)


def check_cpus() -> Finding:
    """Processors this process may use: a run has a driver, a trainer and an engine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        return Finding("cpus", Verdict.WARNING, str(count), "trainer and engine take turns; give it two or more")
    return Finding("cpus", Verdict.GOOD, str(count))


def check_threads() -> Finding:
    """Thread counts of the environment; a run sets its own, other programs do not."""
    value = os.environ.get("OMP_NUM_THREADS")
    return Finding("threads", Verdict.GOOD, f"OMP_NUM_THREADS={value or 'unset'} (a run sets its own)")


def check_memory() -> Finding:
    """Memory that is available now."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return Finding("memory", Verdict.WARNING, "unknown", "check by hand that 2 GiB are free")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.split()[1:]}
    gib = kib.get("MemAvailable", 0) / 2**20
    if gib < 2:
        return Finding("memory", Verdict.BAD, f"{gib:.1f} GiB available", "free some: a small run needs about 2 GiB")
    return Finding("memory", Verdict.GOOD, f"{gib:.1f} GiB available")


def check_shared_memory() -> Finding:
    """The mount that weights pass through."""
    path = Path("/dev/shm")
    if not (path.is_dir() and os.access(path, os.W_OK)):
        return Finding("shared memory", Verdict.WARNING, f"{path} is not writable", "set --sync.directory to a folder")
    free = shutil.disk_usage(path).free / 2**20
    if free < 256:
        remedy = "enlarge it (in Docker: --shm-size 2g), or set --sync.directory"
        return Finding("shared memory", Verdict.WARNING, f"{free:.0f} MiB free in {path}", remedy)
    return Finding("shared memory", Verdict.GOOD, f"{free:.0f} MiB free in {path}")


def check_disk() -> Finding:
    """The disk of the current folder, where runs are written."""
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 1:
        return Finding("disk", Verdict.WARNING, f"{free:.2f} GiB free here", "free some, or use --run-dir elsewhere")
    return Finding("disk", Verdict.GOOD, f"{free:.1f} GiB free here")


def check_loopback() -> Finding:
    """Engines listen on this machine's own address."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding("loopback", Verdict.GOOD, f"port {server.getsockname()[1]} could be opened")
    except OSError as error:
        return Finding("loopback", Verdict.BAD, str(error), "allow listening on 127.0.0.1")


def check_bytecode() -> Finding:
    """Whether compiled modules are kept; without them every start takes more than twice as long."""
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        remedy = "unset it (a run unsets it for its own processes)"
        return Finding("byte code", Verdict.WARNING, "PYTHONDONTWRITEBYTECODE is set", remedy)
    with tempfile.TemporaryDirectory() as folder:
        writable = os.access(folder, os.W_OK)
    return Finding("byte code", Verdict.GOOD if writable else Verdict.WARNING, "kept")


def check_gpus() -> Finding:
    """Accelerators, as the driver's tool lists them; none is fine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpus", Verdict.GOOD, "none found: use --hardware cpu")
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("gpus", Verdict.WARNING, f"nvidia-smi failed: {error}", "check the driver's installation")
    return Finding("gpus", Verdict.GOOD, "; ".join(listed.strip().splitlines()) or "none")


def check_recipes() -> Finding:
    """Installed recipes that can be loaded."""
    from miles_loop.cli import load_recipes

    recipes, problems = load_recipes()
    if problems:
        return Finding("recipes", Verdict.BAD, "; ".join(problems), "install the packages again")
    names = ", ".join(recipe.family for recipe in recipes)
    if not names:
        return Finding("recipes", Verdict.WARNING, "none installed", "pip install miles-qwen3")
    return Finding("recipes", Verdict.GOOD, names)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_cpus,
    check_threads,
    check_memory,
    check_shared_memory,
    check_disk,
    check_loopback,
    check_bytecode,
    check_gpus,
    check_recipes,
)


def examine() -> list[Finding]:
    """All checks in order."""
    return [check() for check in CHECKS]


def text(findings: list[Finding]) -> str:
    """The findings for people."""
    width = max(len(f.name) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.verdict:<8} {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"  {'':<8} {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines) + "\n"
