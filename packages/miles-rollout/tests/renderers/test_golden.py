"""Every family against renderings of the same conversations by independent implementations."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from renderer_fixtures import GOLDEN, folder_of, messages_from, renderer_of
from tokenizers import Tokenizer

CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "golden", EXPECTED, ids=lambda g: f"{g['family']}-{g['case']}-{g['oracle'].replace(' ', '_')}-{g['options']}"
)
def test_renders_as_the_published_form(golden: dict[str, Any]) -> None:
    case = CASES[golden["case"]]
    options = dict(golden["options"])
    hint = options.pop("hint", None)  # what in the folder's template tells versions of a family apart
    renderer = renderer_of(golden["family"], hint).with_options(today=datetime.date(2026, 1, 2), **options)
    ids = renderer.render(messages_from(case["messages"]), case.get("tools", ()))
    assert renderer.decode(ids, skip_special_tokens=False) == golden["text"]
    plain = Tokenizer.from_file(str(folder_of(golden["family"]) / "tokenizer.json"))
    assert ids == plain.encode(golden["text"], add_special_tokens=False).ids
