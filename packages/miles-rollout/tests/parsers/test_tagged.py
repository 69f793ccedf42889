from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_rollout.parsers import JsonCalls, ParsedMessage, TaggedSyntax, parse_completion

OPEN = TaggedSyntax(calls=JsonCalls())
INSIDE = TaggedSyntax(begins_inside=True, calls=JsonCalls())
NONE = TaggedSyntax(opening=None)
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("syntax", "text", "reasoning", "content"),
    [
        (OPEN, "<think>\nwhy\n</think>\n\nso", "why", "so"),
        (OPEN, "\n<think>why</think>so", "why", "so"),
        (OPEN, "so", None, "so"),
        (OPEN, "", None, ""),
        (OPEN, "<think>\n\n</think>\n\nso", None, "so"),
        (OPEN, "<think>never ends", "never ends", ""),
        (OPEN, "so <think>late</think>", None, "so <think>late</think>"),
        (OPEN, "opened in the prompt</think>so", "opened in the prompt", "so"),
        (INSIDE, "why\n</think>\n\nso", "why", "so"),
        (INSIDE, "<think>\nwhy\n</think>\n\nso", "why", "so"),
        (INSIDE, "never ends", "never ends", ""),
        (INSIDE, "</think>so", None, "so"),
        (NONE, "<think>x</think>so", None, "<think>x</think>so"),
    ],
)
def test_reasoning_and_answer(syntax: TaggedSyntax, text: str, reasoning: str | None, content: str) -> None:
    assert parse_completion(text, syntax) == ParsedMessage(content=content, reasoning_content=reasoning)


def test_a_call_ends_reasoning_that_was_not_closed() -> None:
    seen = parse_completion("why" + CALL, INSIDE)
    assert seen.reasoning_content == "why"
    assert [c.function.name for c in seen.tool_calls] == ["f"]
    assert seen.content == ""


def test_calls_without_an_identifier_get_one_each() -> None:
    seen = parse_completion(CALL + CALL, OPEN)
    assert len({c.id for c in seen.tool_calls}) == 2
    named = parse_completion(CALL, OPEN, call_id=lambda n: f"c{n}")
    assert named.tool_calls[0].id == "c0"


def test_the_message_of_a_turn() -> None:
    only_calls = parse_completion("<think>why</think>" + CALL, OPEN, call_id=str).to_message()
    assert (only_calls.role, only_calls.content, only_calls.reasoning_content) == ("assistant", None, "why")
    assert parse_completion("", OPEN).to_message().content == ""


@given(st.text(), st.text())
def test_nothing_is_lost(reasoning: str, content: str) -> None:
    seen = parse_completion(f"<think>{reasoning}</think>{content}", TaggedSyntax(strip=""))
    first, _, rest = f"{reasoning}</think>{content}".partition("</think>")
    assert ((seen.reasoning_content or ""), seen.content) == (first, rest)
