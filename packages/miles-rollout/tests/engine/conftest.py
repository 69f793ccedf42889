"""Tiny models, and engines that serve them in this process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import save_model
from engine_serving import Serving, serve_engine

Serve = Callable[..., Awaitable[Serving]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`models(family, seed=0)`: the folder of a tiny random model, made once."""
    root = tmp_path_factory.mktemp("models")

    def get(family: str, seed: int = 0) -> Path:
        folder = root / f"{family}-{seed}"
        if not folder.exists():
            save_model(family, folder, seed)
        return folder

    return get


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(folder, **options)`: a running engine with its client; ended after the test."""
    started: list[Serving] = []

    async def start(folder: Path, **options: object) -> Serving:
        serving = await serve_engine(folder, **options)
        started.append(serving)
        return serving

    yield start
    for serving in started:
        await serving.close()


@pytest.fixture
async def shared_engine(models: Callable[..., Path], serve: Serve) -> Serving:
    """A dense engine for tests that leave no trace."""
    return await serve(models("qwen3"))
