"""One real SGLang and one embedded engine for each model, for the whole session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipe"))
sys.path.insert(0, str(Path(__file__).parent))

from recipe_runs import Shell
from server import embedded_engine, sglang_server
from sglang_models import EXPERTS, LAYERS, TOP_K, write_dense, write_moe


@dataclass(frozen=True)
class Served:
    """A model that both engines serve.

    Attributes:
        folders: two folders with different weights; the engines start with the first.
        sglang, embedded: URLs.
        sizes: what the conformance suite needs to know of a mixture-of-experts model.
    """

    folders: tuple[Path, Path]
    sglang: str
    embedded: str
    sizes: dict[str, int]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A dense Qwen3 on both engines."""
    root = tmp_path_factory.mktemp("dense")
    folders = (root / "a", root / "b")
    for seed, folder in enumerate(folders):
        write_dense(folder, seed)
    with ExitStack() as stack:
        sglang = stack.enter_context(sglang_server(folders[0], root / "sglang.log", "--weight-version", "0"))
        embedded = stack.enter_context(embedded_engine(folders[0], root / "embedded.log"))
        yield Served(folders, sglang, embedded, {})


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A Qwen3-MoE on both engines; this SGLang records experts, and streams what is new instead of everything."""
    root = tmp_path_factory.mktemp("moe")
    folders = (root / "a", root / "b")
    for seed, folder in enumerate(folders):
        write_moe(folder, seed)
    options = ("--weight-version", "0", "--enable-return-routed-experts", "--incremental-streaming-output")
    sizes = {"experts": EXPERTS, "top_k": TOP_K, "layers": LAYERS}
    with ExitStack() as stack:
        sglang = stack.enter_context(sglang_server(folders[0], root / "sglang.log", *options))
        embedded = stack.enter_context(embedded_engine(folders[0], root / "embedded.log"))
        yield Served(folders, sglang, embedded, sizes)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Runs commands in the test's own folder."""
    made = Shell(tmp_path)
    yield made
    made.close()
