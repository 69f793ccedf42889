"""No field of a request is dropped in silence: it is read, refused with a remedy, known to change nothing, or told."""

from __future__ import annotations

import json
import logging

import aiohttp
import pytest
from service_driving import ask, make
from session_factories import WEATHER, as_json, user
from session_serving import open_session, serving

from miles_rollout.session.errors import BadRequestError
from miles_rollout.session.fields import ACCEPTED, REFUSED, UnknownFields
from miles_rollout.session.requests import ChatRequest, CompletionRequest

OTHERWISE = {
    "n": 2,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {}},
    "top_logprobs": 3,
    "guided_json": {},
    "verbosity": "low",
    "reasoning": {"effort": "low"},
}


def of(name: str) -> object:
    """A value of a refused field that is not one of those that change nothing."""
    neutral = REFUSED[name][0]
    return OTHERWISE.get(name, not neutral[0] if neutral and isinstance(neutral[0], bool) else "something")


@pytest.mark.parametrize("name", REFUSED)
async def test_a_field_that_would_change_something_is_refused_unless_its_value_does_not(renderer, name) -> None:
    service, engine = make(renderer)
    session = service.open()
    with pytest.raises(BadRequestError, match=f"^{name}: got ") as caught:
        await ask(service, session, [user("x")], **{name: of(name)})
    assert caught.value.param == name
    assert len(caught.value.message.partition("; ")[2]) > 5, "a remedy"
    assert engine.calls == []
    for value in (None, *REFUSED[name][0]):
        await ask(service, session, [user("x")], **{name: value})
    assert session.counters().ignored_fields == {}


@pytest.mark.parametrize("value", [True, "1", [1]])
async def test_a_value_is_harmless_only_as_its_own_type(renderer, value) -> None:
    service, _ = make(renderer)
    with pytest.raises(BadRequestError, match="n: got"):
        await ask(service, service.open(), [user("x")], n=value)
    with pytest.raises(BadRequestError, match="use_beam_search"):
        await ask(service, service.open(), [user("x")], use_beam_search=0)


async def test_well_known_fields_without_influence_are_accepted(renderer, caplog) -> None:
    service, engine = make(renderer)
    session = service.open()
    fields = dict.fromkeys(ACCEPTED, "x") | {"parallel_tool_calls": True, "stream_options": {"include_usage": True}}
    await ask(service, session, [user("x")], tools=[WEATHER], **fields)
    assert session.counters().ignored_fields == {}
    assert not caplog.records
    plain, other = make(renderer)
    await ask(plain, plain.open(), [user("x")], tools=[WEATHER])
    assert engine.calls == other.calls


async def test_several_calls_in_a_turn_cannot_be_ruled_out(renderer) -> None:
    service, _ = make(renderer)
    session = service.open()
    with pytest.raises(BadRequestError, match="run the calls one after another") as caught:
        await ask(service, session, [user("x")], tools=[WEATHER], parallel_tool_calls=False)
    assert caught.value.param == "parallel_tool_calls"
    await ask(service, session, [user("x")], parallel_tool_calls=False)  # without tools there is nothing to rule out


async def test_other_fields_are_counted_by_name_and_logged_once(renderer, caplog) -> None:
    service, engine = make(renderer)
    first, second = service.open(), service.open()
    with caplog.at_level(logging.WARNING):
        for session in (first, first, second):
            await ask(service, session, [user("x")], vendor_extra={"a": 1}, provider="here", nothing=None)
    assert len(engine.calls) == 3
    assert first.counters().ignored_fields == {"provider": 2, "vendor_extra": 2}
    assert second.describe()["counters"]["ignored_fields"] == {"provider": 1, "vendor_extra": 1}
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert all("is not known and ignored" in line for line in said)
    service.close(first.id)
    text = service.metrics_text()
    assert 'miles_session_ignored_fields_total{field="vendor_extra"} 3' in text
    assert service.metrics.closed.to_metrics()["ignored_fields"] == 4.0


async def test_completions_are_read_the_same_way(renderer) -> None:
    service, _ = make(renderer)
    session = service.open()

    async def complete(**fields):
        return await service.complete(session.id, json.dumps({"prompt": [1, 2], **fields}).encode())

    for name in ("echo", "suffix", "best_of", "presence_penalty"):
        with pytest.raises(BadRequestError, match=name):
            await complete(**{name: of(name) if name != "echo" else True})
    await complete(echo=False, suffix="", logprobs=1, vendor_extra=1)
    assert session.counters().ignored_fields == {"vendor_extra": 1}


async def test_counts_are_on_the_wire(renderer) -> None:
    async with serving(renderer) as (server, _), aiohttp.ClientSession() as http:
        session_id = await open_session(http, server)
        url = f"{server.url}/sessions/{session_id}"
        body = {"model": "m", "messages": as_json([user("x")]), 'odd"name': 1}
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
        async with http.get(url) as response:
            assert (await response.json())["counters"]["ignored_fields"] == {'odd"name': 1}
        async with http.get(f"{server.url}/metrics") as response:
            assert 'ignored_fields_total{field="odd\\"name"} 1' in await response.text()
        body = {"model": "m", "messages": as_json([user("x")]), "logit_bias": {"3": -100}}
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "logit_bias"


def test_names_that_clients_choose_do_not_grow_without_bound() -> None:
    unknown = UnknownFields()
    counts = [unknown.note([f"field{i}"], "session") for i in range(40)]
    assert counts[31] == {"field31": 1}
    assert counts[32] == {unknown.OTHER: 1}
    assert unknown.note(["field3", "x" * 100, "new\nline"], "session") == {"field3": 1, unknown.OTHER: 2}


def test_every_field_has_one_place() -> None:
    read = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not read & REFUSED.keys()
    assert not ACCEPTED & REFUSED.keys()
