"""Every refusal of a value names its field in `param`, whatever the field and whatever is wrong with it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_driving import ask, make
from session_factories import WEATHER, user
from session_serving import serving

from miles_rollout.session.errors import SessionError
from miles_rollout.session.fields import REFUSED
from miles_rollout.session.requests import ChatRequest, CompletionRequest

WRONG: dict[str, tuple[tuple[object, str], ...]] = {
    # field: (value, what `param` says)
    "model": ((3, "model"),),
    "messages": (
        (None, "messages"),
        (5, "messages"),
        ("hello", "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 5}], "messages[0].role"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "no type"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "function_call": {}}], "messages[0].function_call"),
    ),
    "tools": (
        (5, "tools"),
        ("weather", "tools"),
        ([5], "tools[0]"),
        ([WEATHER, {"type": "retrieval"}], "tools[1]"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
    ),
    "tool_choice": (
        (5, "tool_choice"),
        ([], "tool_choice"),
        ("sometimes", "tool_choice"),
        ({"type": "function", "function": {"name": "nobody"}}, "tool_choice"),
    ),
    "parallel_tool_calls": (("no", "parallel_tool_calls"), (False, "parallel_tool_calls")),
    "stop": ((5, "stop"), ([1], "stop[0]"), (["a", None], "stop[1]"), ("", "stop")),
    "stop_token_ids": (
        (5, "stop_token_ids"),
        ([1, "a"], "stop_token_ids[1]"),
        ([-1], "stop_token_ids[0]"),
        ([1, 10**6], "stop_token_ids"),
    ),
    "ignore_eos": (("yes", "ignore_eos"),),
    "seed": (("x", "seed"), (1.5, "seed"), (-1, "seed"), (2**63, "seed")),
    "stream": (("yes", "stream"),),
    "stream_options": ((True, "stream_options"), ({"include_usage": 3}, "stream_options.include_usage")),
    "temperature": (("hot", "temperature"), (-0.1, "temperature"), ([], "temperature")),
    "top_p": (("x", "top_p"), (0, "top_p"), (1.5, "top_p")),
    "top_k": (("x", "top_k"), (0, "top_k"), (2**40, "top_k")),
    "min_p": (("x", "min_p"), (2, "min_p")),
    "max_tokens": (("x", "max_tokens"), (0, "max_tokens"), (2**40, "max_tokens")),
    "max_completion_tokens": ((1.5, "max_completion_tokens"), (0, "max_completion_tokens")),
    "logprobs": ((5, "logprobs"),),
    "reasoning_effort": ((5, "reasoning_effort"), ("none at all", "reasoning_effort")),
    "chat_template_kwargs": (
        (5, "chat_template_kwargs"),
        ({"unheard": 1}, "chat_template_kwargs"),
        ({"enable_thinking": "x"}, "chat_template_kwargs"),
    ),
}
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def test_every_field_that_is_read_has_a_wrong_value_here() -> None:
    assert set(WRONG) == set(ChatRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "value", "param"), [(f, v, p) for f, cases in WRONG.items() for v, p in cases], ids=repr
)
async def test_a_wrong_value_is_refused_by_the_name_of_its_field(renderer, field, value, param) -> None:
    service, engine = make(renderer)
    fields = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]} | {field: value}
    with pytest.raises(SessionError) as caught:
        await service.chat(service.open().id, json.dumps(fields).encode())
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.partition("[")[0].partition(".")[0] in caught.value.message
    assert engine.calls == []


async def test_a_message_that_comes_later_is_named_by_its_place_in_the_whole_request(renderer) -> None:
    service, _ = make(renderer)
    session = service.open()
    answer = await ask(service, session, [user("x")])
    reply = answer["choices"][0]["message"]
    longer = [{"role": "user", "content": "x"}, reply, {"role": "user", "content": "y"}, {"role": "user", "content": 5}]
    with pytest.raises(SessionError) as caught:
        await service.chat(session.id, json.dumps({"messages": longer}).encode())
    assert caught.value.param == "messages[3].content"


def names_it(error: SessionError | None, field: str) -> bool:
    """Whether a refusal, if it is one, is a client's mistake in this field."""
    if error is None:
        return True
    param = error.param or ""
    return error.status == 400 and (param == field or param.startswith((f"{field}[", f"{field}.")))


async def refusal(serve, session, fields) -> SessionError | None:
    try:
        await serve(session.id, json.dumps(fields).encode())
    except SessionError as error:
        return error
    return None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted({*ChatRequest.__struct_fields__, *REFUSED})), value=ANY)
def test_whatever_a_field_holds_it_is_served_or_refused_by_its_name(renderer, field, value) -> None:
    service, _ = make(renderer)
    fields = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER], "max_tokens": 4} | {field: value}
    error = asyncio.run(refusal(service.chat, service.open(), fields))
    assert names_it(error, field), (error, error and error.param)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted({*CompletionRequest.__struct_fields__, *REFUSED})), value=ANY)
def test_the_same_for_completions_of_ids(renderer, field, value) -> None:
    service, _ = make(renderer)
    fields = {"prompt": [1, 2, 3], "max_tokens": 4} | {field: value}
    error = asyncio.run(refusal(service.complete, service.open(), fields))
    assert names_it(error, field), (error, error and error.param)


@pytest.mark.parametrize(
    ("opened", "param"),
    [
        ({"policy": "loose"}, "policy"),
        ({"polcy": "linear"}, "polcy"),
        ({"sampling": 5}, "sampling"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens"),
        ({"sampling": {"stop": [1]}}, "sampling.stop[0]"),
        ({"thinking": "on"}, "thinking"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"repairs": ["nothing"]}, "repairs[0]"),
        ({"member": -1}, "member"),
        ({"metadata": []}, "metadata"),
    ],
    ids=repr,
)
async def test_opening_a_session_names_the_field_too(renderer, opened, param) -> None:
    async with serving(renderer) as (server, _), aiohttp.ClientSession() as http:
        async with http.post(f"{server.url}/sessions", json=opened) as response:
            assert response.status == 400
            error = (await response.json())["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"5", b"\xff\xfe"])
async def test_a_body_that_is_no_object_has_no_field_to_name(renderer, text) -> None:
    service, _ = make(renderer)
    with pytest.raises(SessionError, match="^request body: ") as caught:
        await service.chat(service.open().id, text)
    assert (caught.value.status, caught.value.param) == (400, None)
