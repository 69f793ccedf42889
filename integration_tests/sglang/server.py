"""Starts engines: a real SGLang on the CPU, in the environment that `nox -s sglang` makes, and an embedded one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_loop.ports import Port
from miles_qwen3.hardware import CPU
from miles_rollout.sglang_launch import SglangOptions, option_arguments

STUBS = Path(__file__).parent / "stubs"
READY_SECONDS = 900.0
CPU_OPTIONS = (
    *option_arguments(SglangOptions(**CPU.overrides["engine"]["sglang"])),
    "--dtype",
    "float32",
    "--skip-server-warmup",
)
"""What a run on the CPU starts SGLang with."""


def sglang_python() -> str:
    """The interpreter of SGLang's own environment.

    Raises:
        RuntimeError: nobody has made it.
    """
    path = os.environ.get("MILES_SGLANG_PYTHON", "")
    if not path or not Path(path).exists():
        raise RuntimeError(f"MILES_SGLANG_PYTHON is {path!r}: run these tests through `nox -s sglang`")
    return path


@contextmanager
def sglang_server(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The URL of a ready server for `model`; its output goes to `log`, all its processes end with the block."""
    port = Port("127.0.0.1")
    environment = {
        **os.environ,
        "PYTHONPATH": str(STUBS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port.number), *CPU_OPTIONS, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_ready(process, f"{port.url}/model_info", log)
        yield port.url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        port.close()


@contextmanager
def embedded_engine(model: Path, log: Path) -> Iterator[str]:
    """The URL of a ready embedded engine for `model`, in a process of its own."""
    port = Port("127.0.0.1")
    command = [sys.executable, "-m", "miles_rollout.engine", "--model-path", str(model), "--weight-version", "0"]
    command += ["--host", "127.0.0.1", "--port", str(port.number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait_ready(process, f"{port.url}/health", log)
        yield port.url
    finally:
        process.kill()
        process.wait()
        port.close()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the engine was not ready after {READY_SECONDS} s:\n{log.read_text()[-3000:]}")
