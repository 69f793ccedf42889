"""What is said of an unfinished turn stays true, however the turn goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_rollout.parsers import (
    CompletionSyntax,
    GemmaCalls,
    HarmonySyntax,
    InklingSyntax,
    InvokeCalls,
    JsonCalls,
    KimiCalls,
    PairCalls,
    PiecedSyntax,
    Progress,
    TaggedSyntax,
    XmlCalls,
    text_before,
)

FORMATS = [JsonCalls(), XmlCalls(), PairCalls(), InvokeCalls(block="calls"), KimiCalls(), GemmaCalls(), None]
FRAGMENTS = [
    *("a", "b c", "\n", " ", "<", "<|", "é"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", "<calls>", "</calls>"),
    '{"name": "f", "arguments": {}}',
    "<function=f>\n</function>",
    "f<arg_key>k</arg_key><arg_value>v</arg_value>",
    '<invoke name="f"></invoke>',
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "call:f{}",
]


@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    calls=st.sampled_from(FORMATS),
    inside=st.booleans(),
    opening=st.sampled_from(["<think>", None]),
    strip=st.sampled_from(["\n", ""]),
)
def test_what_is_certain_stays(pieces: list[str], calls: object, inside: bool, opening: str | None, strip: str) -> None:
    syntax = TaggedSyntax(opening=opening, begins_inside=inside, calls=calls, strip=strip)  # type: ignore[arg-type]
    text = "".join(pieces)
    whole = syntax.parse(text, (), lambda index: str(index))
    never_opened = opening is not None and not inside and not text.lstrip().startswith("<think>")
    for end in range(len(text) + 1):
        seen = syntax.so_far(text[:end])
        if never_opened and "</think>" in text and "</think>" not in text[:end]:
            continue  # the one reading that is taken for granted
        assert whole.content.startswith(seen.content)
        assert seen.reasoning_content in (None, whole.reasoning_content)


HARMONY = [
    *("<|start|>assistant", "<|channel|>", "final", "analysis", "commentary to=functions.f ", "<|constrain|>json"),
    *("<|message|>", "<|end|>", "<|return|>", "<|call|>", "{}", "{", "a", "b <", "<|"),
]
INKLING = [
    *("<|message_model|>", "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", '{"name": "f", "args": {}}', "{", "a", "b <", "<|"),
]


@pytest.mark.parametrize(("make", "fragments"), [(HarmonySyntax, HARMONY), (InklingSyntax, INKLING)])
@given(data=st.data(), calls=st.booleans())
def test_what_is_certain_of_a_turn_of_pieces_stays(
    make: type[PiecedSyntax], fragments: list[str], data: st.DataObject, calls: bool
) -> None:
    syntax = make(calls=calls)
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=14)))
    whole = syntax.parse(text, (), lambda index: str(index))
    assert calls or not (whole.tool_calls or whole.malformed)
    shown = ""
    for end in range(len(text) + 1):
        seen = syntax.so_far(text[:end])
        assert whole.content.startswith(seen.content)
        assert seen.content.startswith(shown)
        assert seen.reasoning_content is None
        shown = seen.content


CUT_CALL = "<|channel|>commentary to=functions.f<|message|>{<|call|>"
WHOLE_CALL = "<|channel|>a to=functions.f<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("syntax", "text", "content", "reasoning"),
    [
        (TaggedSyntax(calls=JsonCalls()), "Hello the", "Hello the", None),
        (TaggedSyntax(calls=JsonCalls()), "<thi", "", None),
        (TaggedSyntax(calls=JsonCalls()), "<think>\nwhy", "", None),
        (TaggedSyntax(calls=JsonCalls()), "<think>\nwhy\n</think>", "", "why"),
        (TaggedSyntax(calls=JsonCalls()), "<think>\nwhy\n</think>\n\nso", "so", "why"),
        (TaggedSyntax(calls=JsonCalls()), "One.\n\n", "One.", None),
        (TaggedSyntax(calls=JsonCalls()), "One.\n\n<tool", "One.", None),
        (TaggedSyntax(calls=JsonCalls()), "a < b", "a < b", None),
        (TaggedSyntax(begins_inside=True), "why", "", None),
        (TaggedSyntax(opening=None), "<think>", "<think>", None),
        (TaggedSyntax(calls=JsonCalls()).without_calls(), "a<tool_call>", "a<tool_call>", None),
        (HarmonySyntax(), "<|channel|>final<|message|>so", "so", None),
        (HarmonySyntax(), "<|channel|>final", "", None),
        (HarmonySyntax(), "<|channel|>final<|message|>so<|en", "so", None),
        (HarmonySyntax(), "<|channel|>analysis<|message|>why<|end|><|start|>assistant", "", None),
        (HarmonySyntax(), "<|channel|>commentary to=functions.f<|message|>{}", "", None),
        (HarmonySyntax(), "<|channel|>commentary to=functions.f<|message|>{<|call|>", CUT_CALL, None),
        (HarmonySyntax(), "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", None),
        (HarmonySyntax(calls=False), "<|channel|>a to=functions.f<|message|>{}<|call|>", WHOLE_CALL, None),
        (InklingSyntax(), "<|content_text|>so", "so", None),
        (InklingSyntax(), "<|content_thinking|>why<|end_message|>", "", None),
        (InklingSyntax(), '<|content_invoke_tool_json|>{"name": "f"}<|end_message|>', "", None),
    ],
)
def test_examples(syntax: CompletionSyntax, text: str, content: str, reasoning: str | None) -> None:
    assert syntax.so_far(text) == Progress(content=content, reasoning_content=reasoning)


@given(st.text("ab<", max_size=12), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), st.data())
def test_text_before_a_marker(text: str, markers: list[str], data: st.DataObject) -> None:
    want = text[: min((at for m in markers if (at := text.find(m)) >= 0), default=len(text))]
    early = text_before(text[: data.draw(st.integers(0, len(text)))], markers)
    assert want.startswith(early)
    assert want.startswith(text_before(text, markers))
    assert len(text_before(text, markers)) > len(want) - max(map(len, markers), default=1)
