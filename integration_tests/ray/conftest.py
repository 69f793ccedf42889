"""One Ray cluster of two nodes on this machine for the whole session, and a shell for each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipe"))

from ray_cluster import TwoNodes
from recipe_runs import Shell

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A raylet that is gone refuses connections at once: the checks are frequent, not impatient.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[TwoNodes]:
    """Started once: a cluster takes ten seconds."""
    kept = {name: os.environ.pop(name, None) for name in ("RAY_ADDRESS", *ENVIRONMENT)}
    os.environ.update(ENVIRONMENT)
    cluster = TwoNodes()
    yield cluster
    cluster.close()
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def cluster(session_cluster: TwoNodes) -> TwoNodes:
    """The cluster with both of its nodes."""
    session_cluster.make_whole()
    return session_cluster


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Runs commands in the test's own folder."""
    made = Shell(tmp_path)
    made.environment |= ENVIRONMENT
    yield made
    made.close()
