"""Matchers decide equality; repairs overlook only what a harness cannot have meant."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_factories import assistant, call, tool, user

from miles_contracts import InvalidFieldError
from miles_rollout.session.errors import BadRequestError, MatcherError
from miles_rollout.session.matching import (
    ALL_REPAIRS,
    EXACT,
    Difference,
    Repair,
    load_matcher,
    loose_tool_call,
    reconcile,
    role_content_only,
    same_arguments,
    strict,
)
from miles_rollout.session.messages import parse_messages

STORED = assistant("Hello", reasoning="hm", calls=[call("f", '{"a": 1, "b": [true]}', "id1")])


def repaired(stored, replayed, matcher=strict, allowed=ALL_REPAIRS):
    return reconcile(stored, replayed, matcher, allowed=allowed, own=True)


def test_three_matchers() -> None:
    respelled = assistant("Hello", reasoning="hm", calls=[call("f", '{"b":[true],"a":1.0}', "id1")])
    bare = assistant("Hello")
    assert strict(STORED, STORED)
    assert not strict(STORED, respelled)
    assert loose_tool_call(STORED, respelled)
    assert not loose_tool_call(STORED, bare)
    assert not loose_tool_call(STORED, assistant("Hello", calls=STORED.tool_calls))
    assert not loose_tool_call(STORED, assistant("Hello", reasoning="hm", calls=[call("g", "{}", "id1")]))
    assert role_content_only(STORED, bare)
    assert not role_content_only(STORED, user("Hello"))
    assert not role_content_only(STORED, assistant("Hello!"))


def test_each_repair() -> None:
    assert repaired(STORED, STORED) is EXACT
    calls = STORED.tool_calls
    assert repaired(STORED, assistant("Hello", calls=calls)).repairs == {Repair.REASONING_OMITTED}
    assert repaired(STORED, assistant(" Hello\n", reasoning="hm", calls=calls)).repairs == {Repair.WHITESPACE_EDGES}
    assert repaired(STORED, assistant("Hello", reasoning="hm\n", calls=calls)).repairs == {Repair.WHITESPACE_EDGES}
    respelled = [call("f", '{"b":[true],"a":1}', "id1")]
    found = repaired(STORED, assistant("Hello", reasoning="hm", calls=respelled))
    assert found.repairs == {Repair.ARGUMENTS_RESERIALISED}
    renamed = [call("f", STORED.tool_calls[0].function.arguments, "x")]
    found = repaired(STORED, assistant("Hello", reasoning="hm", calls=renamed))
    assert (found.repairs, found.id_map) == ({Repair.TOOL_CALL_IDS_REWRITTEN}, {"x": "id1"})


@pytest.mark.parametrize(
    ("replayed", "field"),
    [
        (user("Hello"), "role"),
        (assistant("Hello there", reasoning="hm", calls=STORED.tool_calls), "content"),
        (assistant("Hel lo", reasoning="hm", calls=STORED.tool_calls), "content"),
        (assistant("Hello", reasoning="other", calls=STORED.tool_calls), "reasoning_content"),
        (assistant("Hello", reasoning="hm"), "tool_calls"),
        (assistant("Hello", reasoning="hm", calls=[call("g", '{"a": 1}', "id1")]), "tool_calls[0].function.name"),
        (assistant("Hello", reasoning="hm", calls=[call("f", '{"a": 2}', "id1")]), "tool_calls[0].function.arguments"),
        (assistant("Hello", reasoning="hm", calls=[call("f", "{broken", "id1")]), "tool_calls[0].function.arguments"),
    ],
)
def test_real_differences_are_named(replayed, field) -> None:
    found = repaired(STORED, replayed)
    assert isinstance(found, Difference)
    assert found.field == field


def test_only_the_policys_own_messages_are_repaired() -> None:
    found = reconcile(user("a"), user("a "), strict, allowed=ALL_REPAIRS, own=False)
    assert found == Difference("content", "a", "a ")
    found = reconcile(tool("a", "1"), tool("a", "2"), strict, allowed=ALL_REPAIRS, own=False)
    assert found == Difference("tool_call_id", "1", "2")


def test_a_repair_that_is_not_allowed_is_a_difference() -> None:
    found = repaired(STORED, assistant("Hello", calls=STORED.tool_calls), allowed=frozenset({Repair.WHITESPACE_EDGES}))
    assert found == Difference("reasoning_content", "hm", None)


def test_renaming_two_calls_to_one_id_is_no_renaming() -> None:
    two = assistant(None, calls=[call("f", "{}", "a"), call("f", "{}", "b")])
    same = assistant(None, calls=[call("f", "{}", "x"), call("f", "{}", "x")])
    assert repaired(two, same) == Difference("tool_calls[0].id", "a", "x")
    swapped = assistant(None, calls=[call("f", "{}", "b"), call("f", "{}", "a")])
    assert repaired(two, swapped).id_map == {"b": "a", "a": "b"}


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1, "b": {"c": [1, null]}}', '{"b":{"c":[1,null]},"a":1}', True),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ('{"a": NaN}', '{"a": NaN }', False),
        ("", "{}", True),
        ("[1]", "[1 ]", False),
        ('{"a": 10000000000000000000000000000001}', '{"a": 10000000000000000000000000000000}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": null}', "{}", False),
        ('{"a": {}}', '{"a": []}', False),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", '{"a":1}', False),
    ],
)
def test_arguments(a, b, same) -> None:
    assert same_arguments(a, b) is same
    assert same_arguments(b, a) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_any_spelling_of_an_object_is_the_same(value) -> None:
    again = json.dumps(dict(reversed(value.items())), indent=2, ensure_ascii=False)
    assert same_arguments(json.dumps(value), again)


def _even(stored, replayed) -> bool:
    return len(replayed.content) % 2 == 0


def _wrong(stored, replayed):
    return 1


def _raises(stored, replayed):
    raise KeyError("x")


def test_a_users_matcher(monkeypatch) -> None:
    import sys
    import types

    module = types.ModuleType("my_matchers")
    module.even, module.wrong, module.raises, module.value = _even, _wrong, _raises, 3
    monkeypatch.setitem(sys.modules, "my_matchers", module)
    assert load_matcher("my_matchers:even")(STORED, user("ab")) is True
    with pytest.raises(MatcherError, match="returned 1"):
        load_matcher("my_matchers:wrong")(STORED, STORED)
    with pytest.raises(MatcherError, match="raised KeyError"):
        load_matcher("my_matchers:raises")(STORED, STORED)
    for spec in ("nonsense", "my_matchers:nothing", "no_such_module_:x", "my_matchers:value", ":x"):
        with pytest.raises(InvalidFieldError, match="matcher"):
            load_matcher(spec)


def test_messages_are_normalised() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    raw = [
        {"role": "user", "content": parts, "junk": 1},
        {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [], "name": "bot", "refusal": None},
        {"role": "assistant", "content": None, "function_call": None, "reasoning": "r"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": None, "tool_call_id": "1"},
    ]
    messages = parse_messages(json.dumps(raw).encode())
    assert messages == (
        user("ab"),
        assistant(""),
        assistant("", reasoning="r"),
        assistant(None, calls=[call("f", '{"x":1}', "1")]),
        tool("", "1"),
    )
    with pytest.raises(BadRequestError, match=r"messages\[7\].role"):
        parse_messages(b'[{"role": "x"}]', 7)
