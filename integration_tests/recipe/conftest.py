"""Makes `recipe_runs` importable; a shell for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recipe_runs import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Runs commands in the test's own folder."""
    made = Shell(tmp_path)
    yield made
    made.close()
