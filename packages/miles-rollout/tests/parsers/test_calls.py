"""Every call format: what is read, what is kept as text, and why."""

# ruff: noqa: E501 - a call is easier to compare with its neighbours on one line
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_rollout.parsers import (
    CallFormat,
    GemmaCalls,
    HarmonySyntax,
    InklingSyntax,
    InvokeCalls,
    JsonCalls,
    KimiCalls,
    PairCalls,
    ParsedCalls,
    XmlCalls,
    parse_completion,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "maybe": {"type": ["string", "null"]},
                    "bare": {},
                },
            },
        },
    }
]
MINIMAX = InvokeCalls(block="minimax:tool_call")
DSML = InvokeCalls(block="｜DSML｜tool_calls", prefix="｜DSML｜")


def read(calls: CallFormat, text: str) -> ParsedCalls:
    return calls.parse(text, TOOLS, lambda n: f"c{n}")


def pairs(found: ParsedCalls) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]


GOOD: list[tuple[CallFormat, str]] = [
    (JsonCalls(), '<tool_call>\n{"name": "f", "arguments": {"text": "x", "count": 2}}\n</tool_call>'),
    (XmlCalls(), "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>"),
    (PairCalls(), "<tool_call>f<arg_key>text</arg_key><arg_value>x</arg_value><arg_key>count</arg_key><arg_value>2</arg_value></tool_call>"),
    (PairCalls(), "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"),
    (MINIMAX, '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">x</parameter>\n<parameter name="count">2</parameter>\n</invoke>\n</minimax:tool_call>'),
    (DSML, '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text" string="true">x</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
    (KimiCalls(), '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"text": "x", "count": 2}<|tool_call_end|><|tool_calls_section_end|>'),
    (GemmaCalls(), '<|tool_call>call:f{text:<|"|>x<|"|>,count:2}<tool_call|>'),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "text"), GOOD, ids=lambda v: type(v).__name__ if not isinstance(v, str) else "")
def test_a_call_and_the_text_around_it(calls: CallFormat, text: str) -> None:
    found = read(calls, f"Before.\n\n{text}")
    assert pairs(found) == [("f", {"text": "x", "count": 2})]
    assert found.content == "Before."
    assert found.malformed == ()
    assert read(calls, "no call at all").content == "no call at all"
    assert text.startswith(calls.opening)


@pytest.mark.parametrize(("calls", "text"), GOOD, ids=lambda v: type(v).__name__ if not isinstance(v, str) else "")
def test_several_calls(calls: CallFormat, text: str) -> None:
    found = read(calls, f"{text}\n{text}")
    assert pairs(found) == [("f", {"text": "x", "count": 2})] * 2
    assert found.content == ""


BAD: list[tuple[CallFormat, str, str]] = [
    (JsonCalls(), '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>', "not JSON"),
    (JsonCalls(), '<tool_call>["f"]</tool_call>', "object with a"),
    (JsonCalls(), '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
    (JsonCalls(), '<tool_call>{"name": "", "arguments": {}}</tool_call>', "object with a"),
    (JsonCalls(), '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "text after the call"),
    (XmlCalls(), "<tool_call><function=f></tool_call>", "exactly one"),
    (XmlCalls(), "<tool_call><function=f>loose</function></tool_call>", "unexpected text"),
    (XmlCalls(), "<tool_call><function=f>\n<parameter=a>1</parameter>\n<parameter=a>2</parameter></function></tool_call>", "twice"),
    (XmlCalls(), "<tool_call><function=f>x<parameter=a>1</parameter></function></tool_call>", "unexpected text"),
    (PairCalls(), "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "begin with the name"),
    (PairCalls(), "<tool_call>f<arg_key>a</arg_key></tool_call>", "unexpected text"),
    (PairCalls(), "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "twice"),
    (MINIMAX, "<minimax:tool_call>nothing</minimax:tool_call>", "no readable call"),
    (MINIMAX, '<minimax:tool_call><invoke name="">\n</invoke></minimax:tool_call>', "must name a tool"),
    (MINIMAX, '<minimax:tool_call><invoke name="f">loose</invoke></minimax:tool_call>', "unexpected text"),
    (MINIMAX, '<minimax:tool_call>x<invoke name="f">y</invoke></minimax:tool_call>', "between calls"),
    (DSML, '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">{</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>', "says that it is JSON"),
    (MINIMAX, '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter><parameter name="a">1</parameter></invoke></minimax:tool_call>', "twice"),
    (KimiCalls(), "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>", "not JSON"),
    (KimiCalls(), "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>", "must be an object"),
    (KimiCalls(), "<|tool_call_begin|>functions.f:0<|tool_call_end|>", "and arguments"),
    (GemmaCalls(), "<|tool_call>f{}<tool_call|>", "call:NAME"),
    (GemmaCalls(), "<|tool_call>call:f{a:nope}<tool_call|>", "is not a value"),
    (GemmaCalls(), '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "not closed"),
    (GemmaCalls(), "<|tool_call>call:f{a:1 b:2}<tool_call|>", "expected a comma"),
    (GemmaCalls(), "<|tool_call>call:f{a:1,a:2}<tool_call|>", "twice"),
    (GemmaCalls(), "<|tool_call>call:f{:1}<tool_call|>", "no key"),
    (GemmaCalls(), "<|tool_call>call:f{a:}<tool_call|>", "no value"),
    (GemmaCalls(), '<|tool_call>call:f{<|"|>a<|"|>}<tool_call|>', "no value for"),
    (GemmaCalls(), "<|tool_call>call:f[1]<tool_call|>", "no value"),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "text", "why"), BAD)
def test_a_malformed_call_is_delivered_as_text_with_its_reason(calls: CallFormat, text: str, why: str) -> None:
    found = read(calls, f"a {text} b")
    assert found.tool_calls == ()
    assert found.content.replace("\n", "") == f"a {text} b".replace("\n", "")
    assert len(found.malformed) >= 1
    assert why in found.malformed[0]


@pytest.mark.parametrize(("calls", "text"), [(c, t) for c, t in GOOD if not isinstance(c, InvokeCalls)])
def test_a_good_call_beside_a_bad_one(calls: CallFormat, text: str) -> None:
    bad = next(t for c, t, _ in BAD if type(c) is type(calls))
    found = read(calls, f"{text}\n{bad}")
    assert pairs(found) == [("f", {"text": "x", "count": 2})]
    assert len(found.malformed) == 1
    assert bad in found.content


@pytest.mark.parametrize("calls", [JsonCalls(), XmlCalls(), PairCalls(), MINIMAX])
def test_a_closing_tag_may_be_missing_at_the_end(calls: CallFormat) -> None:
    text = next(t for c, t in GOOD if c == calls)
    assert pairs(read(calls, text[: text.rindex("</")])) == [("f", {"text": "x", "count": 2})]


@pytest.mark.parametrize("calls", [JsonCalls(), XmlCalls(), PairCalls()])
def test_a_closing_tag_inside_an_argument_does_not_end_the_call(calls: CallFormat) -> None:
    text = re.sub(r"\bx\b", "a </tool_call> b", next(t for c, t in GOOD if c == calls))
    assert pairs(read(calls, text)) == [("f", {"text": "a </tool_call> b", "count": 2})]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "42", "42"),
        ("text", "true", "true"),
        ("text", "", ""),
        ("count", "42", 42),
        ("count", "many", "many"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("maybe", "42", "42"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "x", "x"),
        ("bare", "[1, 2]", [1, 2]),
        ("bare", "NaN", "NaN"),
        ("unknown", "1.5", 1.5),
        ("unknown", "words", "words"),
    ],
)
def test_values_take_the_type_that_the_tool_declares(key: str, written: str, value: Any) -> None:
    xml = f"<tool_call><function=f><parameter={key}>\n{written}\n</parameter></function></tool_call>"
    assert pairs(read(XmlCalls(), xml)) == [("f", {key: value})]
    pair = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{written}</arg_value></tool_call>"
    assert pairs(read(PairCalls(), pair)) == [("f", {key: value})]


def test_json_arguments_stay_as_they_were_spelled() -> None:
    text = '<tool_call>{"name":"f","arguments":{"b" : 1,\n "a":"\\u00e9"}}</tool_call>'
    assert read(JsonCalls(), text).tool_calls[0].function.arguments == '{"b" : 1,\n "a":"\\u00e9"}'
    quoted = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(JsonCalls(), quoted).tool_calls[0].function.arguments == '{"a": 1}'
    tricky = '<tool_call>{"note": "\\"arguments\\": {}", "name": "f", "arguments": {"a": 2}}</tool_call>'
    assert pairs(read(JsonCalls(), tricky)) == [("f", {"a": 2})]
    assert pairs(read(JsonCalls(), '<tool_call>{"name": "f"}</tool_call>')) == [("f", {})]
    assert pairs(read(JsonCalls(), '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>')) == [("f", {"a": 1})]


def test_kimi_keeps_the_identifier_that_the_model_chose() -> None:
    text = next(t for c, t in GOOD if isinstance(c, KimiCalls)).replace("functions.f:0", "functions.ns:f:12")
    call = read(KimiCalls(), text).tool_calls[0]
    assert (call.id, call.function.name) == ("functions.ns:f:12", "ns:f")


def test_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    )
    seen = parse_completion(text, HarmonySyntax(), call_id=str)
    assert (seen.reasoning_content, seen.content) == ("why", "Looking.")
    assert [(c.function.name, c.function.arguments) for c in seen.tool_calls] == [("f", '{"a": 1}')]
    other = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert parse_completion(other, HarmonySyntax(), call_id=str).tool_calls == seen.tool_calls
    assert parse_completion("<|channel|>final<|message|>so", HarmonySyntax()).content == "so"
    assert parse_completion("no structure", HarmonySyntax()).content == "no structure"


@pytest.mark.parametrize(("body", "why"), [("{", "not JSON"), ("[1]", "object")])
def test_harmony_malformed(body: str, why: str) -> None:
    text = f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{body}"
    seen = parse_completion(text, HarmonySyntax())
    assert seen.tool_calls == ()
    assert seen.content == text
    assert why in seen.malformed[0]


def test_inkling() -> None:
    text = (
        "<|content_thinking|>why<|end_message|><|message_model|><|content_text|>so<|end_message|>"
        '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>'
    )
    seen = parse_completion(text, InklingSyntax(), call_id=str)
    assert (seen.reasoning_content, seen.content) == ("why", "so")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in seen.tool_calls] == [("f", {"a": 1})]
    assert parse_completion("no structure", InklingSyntax()).content == "no structure"


@pytest.mark.parametrize(("body", "why"), [("{", "not JSON"), ('{"name":"f","args":[]}', "args"), ("[]", "object")])
def test_inkling_malformed(body: str, why: str) -> None:
    text = f"f<|content_invoke_tool_json|>{body}<|end_message|>"
    seen = parse_completion(text, InklingSyntax())
    assert seen.tool_calls == ()
    assert seen.content == text
    assert why in seen.malformed[0]


ALL: list[Callable[[str], object]] = [
    *(lambda text, c=calls: read(c, text) for calls in (JsonCalls(), XmlCalls(), PairCalls(), MINIMAX, DSML, KimiCalls(), GemmaCalls())),
    *(lambda text, s=syntax: parse_completion(text, s) for syntax in (HarmonySyntax(), InklingSyntax())),
]  # fmt: skip
FRAGMENTS = st.lists(
    st.sampled_from([t[i : i + 9] for _, t in GOOD for i in range(0, len(t), 9)] + ["{", "}", '"', "</", ">", "\\"])
    | st.text(max_size=4),
    max_size=14,
).map("".join)


@given(FRAGMENTS)
def test_no_text_breaks_a_parser(text: str) -> None:
    for parse in ALL:
        parse(text)
