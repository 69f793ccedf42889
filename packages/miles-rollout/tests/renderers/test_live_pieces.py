"""Turns made of pieces, shown while they are sampled: the deltas are the beginning of the finished turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderer_fixtures import renderer_of

from miles_rollout.renderers import Renderer
from miles_rollout.session.live import Delta, LiveTurn

ANALYSIS = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
HARMONY = {
    f"{ANALYSIS}<|channel|>final<|message|>so it is<|return|>": ("so it is", "why", 0),
    f"{ANALYSIS}<|channel|>commentary<|message|>wait<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>": ("wait", "why", 1),
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{<|call|>": (None, None, 0),
}
THINKING = "<|content_thinking|>why<|end_message|><|message_model|>"
INKLING = {
    f"{THINKING}<|content_text|>so it is<|end_message|>": ("so it is", "why", 0),
    f'{THINKING}<|content_invoke_tool_json|>{{"name": "f", "args": {{}}}}<|end_message|>': ("", "why", 1),
}
CASES = [("gpt_oss", text, seen) for text, seen in HARMONY.items()]
CASES += [("inkling", text, seen) for text, seen in INKLING.items()]


def ids_of(renderer: Renderer, text: str) -> list[int]:
    pieces = renderer.vocabulary.split(text)
    return [i for p in pieces for i in ([p] if isinstance(p, int) else renderer.vocabulary.encode(p))]


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize(("family", "text", "seen"), CASES)
def test_content_grows_and_is_never_taken_back(
    family: str, text: str, seen: tuple[str | None, str | None, int], calls: bool
) -> None:
    renderer = renderer_of(family)
    ids = ids_of(renderer, text)
    deltas: list[Delta] = []
    view = LiveTurn(renderer, (), deltas.append, calls=calls)
    for end in range(1, len(ids) + 1):
        view.advance(np.asarray(ids[:end], dtype=np.int32))
    parsed = renderer.parse(ids, calls=calls)
    assert view.settle(parsed, ids) == parsed
    shown = "".join(delta.content for delta in deltas)
    assert parsed.content.startswith(shown)
    assert all(delta.reasoning_content is None for delta in deltas)
    content, reasoning, count = seen
    assert parsed.reasoning_content == reasoning
    assert len(parsed.tool_calls) == (count if calls else 0)
    if content and calls:
        assert parsed.content == shown == content
        assert len(deltas) > 1 or len(ids_of(renderer, content)) == 1
    if content is None and calls:
        assert parsed.malformed


@pytest.mark.parametrize("family", ["gpt_oss", "inkling"])
@given(data=st.data(), calls=st.booleans())
def test_whatever_is_sampled_begins_with_what_was_shown(family: str, data: st.DataObject, calls: bool) -> None:
    renderer = renderer_of(family)
    added = sorted(renderer.vocabulary.added.values())
    plain = renderer.vocabulary.encode("analysis final to=functions.f {} é")
    ids = data.draw(st.lists(st.sampled_from([*added, *plain]), max_size=20))
    deltas: list[Delta] = []
    view = LiveTurn(renderer, (), deltas.append, calls=calls)
    for end in sorted(data.draw(st.sets(st.integers(0, len(ids))))):
        view.advance(np.asarray(ids[:end], dtype=np.int32))
    final = view.settle(renderer.parse(ids, calls=calls), ids)
    assert final.content.startswith("".join(delta.content for delta in deltas))
