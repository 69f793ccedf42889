"""Factories for pure tests, and real engines for the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The factories sit beside the tests; importlib mode does not put this folder on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))

from rollout_engines import EngineProcess, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    pytest.importorskip("torch")
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def shared_processes(tiny_model: Path) -> Iterator[list[EngineProcess]]:
    """Two engine processes of all tests; whoever hurts one starts it again."""
    processes = [EngineProcess(tiny_model) for _ in range(2)]
    for process in processes:
        process.launch()
    for process in processes:
        process.wait_ready()
    yield processes
    for process in processes:
        process.end()


@pytest.fixture
def processes(shared_processes: list[EngineProcess]) -> list[EngineProcess]:
    """Two running engine processes with the weights of `tiny_model`, version 0."""
    for process in shared_processes:
        assert process.process is not None
        if process.process.poll() is not None:
            process.launch()
            process.wait_ready()
    return shared_processes
