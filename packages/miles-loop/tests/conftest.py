"""Makes `loop_toy` importable and runs its commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loop_toy.harness import Command


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Command]:
    """The real thing on a tiny model."""
    command = Command("loop_toy.recipe", tmp_path)
    yield command
    command.close()


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Command]:
    """The same command with processes that have no model: starts in a second."""
    command = Command("loop_toy.fast", tmp_path)
    yield command
    command.close()
