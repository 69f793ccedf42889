import sys
from pathlib import Path

import pytest

# The factories sit beside the tests; importlib mode does not put this folder on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))

from session_factories import write_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(model_dir: Path):
    from miles_rollout.renderers import load_renderer

    return load_renderer(model_dir, "qwen3")
