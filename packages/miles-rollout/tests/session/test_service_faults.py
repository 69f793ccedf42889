"""Whatever is refused or fails leaves the session as it was, and says why."""

from __future__ import annotations

import asyncio
import json

import pytest
from service_driving import ask, make, reply_of
from session_factories import WEATHER, ScriptedEngine, as_json, user

from miles_contracts import EngineError, EngineUnavailableError, GenerateResult, SamplingParams, VersionSpan
from miles_rollout.session import EngineSampler, OpenRequest, SessionConfig, SessionService, audit
from miles_rollout.session.errors import (
    BadRequestError,
    ContextLengthError,
    NodeLimitError,
    RenderRefusedError,
    SessionBusyError,
    SessionLimitError,
    SessionNotFoundError,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamTimeoutError,
    UpstreamUnavailableError,
)


async def test_a_second_request_of_a_linear_session_is_refused_or_waits(renderer) -> None:
    service, engine = make(renderer, ["A", "B"])
    session = service.open()
    engine.gate = asyncio.Event()
    running = asyncio.create_task(ask(service, session, [user("x")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(SessionBusyError):
        await ask(service, session, [user("x")])
    engine.gate.set()
    assert reply_of(await running)["content"] == "A"
    assert len(session.tree.nodes) == 1

    service, engine = make(renderer, ["A", "B"], wait_when_busy=True)
    session = service.open()
    one, two = await asyncio.gather(ask(service, session, [user("x")]), ask(service, session, [user("x")]))
    assert {reply_of(one)["content"], reply_of(two)["content"]} == {"A", "B"}
    assert session.counters().abandoned_turns == 1


def answer_of(ids, logprobs, spans, finish="stop"):
    return GenerateResult(
        output_ids=ids, logprobs=logprobs, version_spans=spans, finish_reason=finish, request_id="same"
    )


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (EngineUnavailableError("e", "died"), UpstreamUnavailableError, "died"),
        (EngineError("e", "too long", 400), UpstreamRefusedError, "too long"),
        (EngineError("e", "bad", 500), UpstreamError, "bad"),
        (TimeoutError(), UpstreamTimeoutError, "no answer within"),
        (answer_of([1, 2], [-1.0], ()), UpstreamError, "log-probs for 2"),
        (answer_of([1, 2], [-1.0, 0.5], ()), UpstreamError, "positive"),
        (answer_of([1, 2], [-1.0, float("nan")], ()), UpstreamError, "finite"),
        (answer_of([1.5], [-1.0], ()), UpstreamError, "output_ids has dtype"),
        (answer_of([10**6], [-1.0], ()), UpstreamError, "leave"),
        (answer_of([1, 2], [-1.0, -1.0], (VersionSpan(start=0, end=1, version=0),)), UpstreamError, "do not cover"),
        (answer_of([1], [-1.0], (), "abort"), UpstreamUnavailableError, "aborted"),
        (answer_of([1], [-1.0], (), "because"), UpstreamError, "finish_reason"),
        (answer_of([1] * 5000, [-1.0] * 5000, ()), UpstreamError, "at most"),
    ],
)
async def test_an_engine_fault_leaves_the_session_unchanged(renderer, reply, kind, says) -> None:
    service, _engine = make(renderer, ["A", reply, "B"])
    session = service.open()
    one = await ask(service, session, [user("x")])
    before = session.describe()
    messages = [user("x"), reply_of(one), user("y")]
    with pytest.raises(kind, match=says):
        await ask(service, session, messages)
    after = session.describe()
    assert after["nodes"] == before["nodes"]
    assert after["messages"] == before["messages"]
    await ask(service, session, messages)
    (trajectory,) = service.trajectories(session.id)
    assert len(trajectory.turns) == 2
    assert audit([trajectory]).mismatches == 0


async def test_an_engine_that_hangs_times_out(renderer) -> None:
    service, engine = make(renderer, engine_timeout_s=0.02)
    engine.gate = asyncio.Event()
    session = service.open()
    with pytest.raises(UpstreamTimeoutError, match="0.02 s"):
        await ask(service, session, [user("x")])
    assert session.tree.nodes == []
    await asyncio.sleep(0.01)
    assert len(engine.aborted) == 1


async def test_deleting_a_session_ends_its_request(renderer) -> None:
    service, engine = make(renderer)
    engine.gate = asyncio.Event()
    session = service.open()
    running = asyncio.create_task(ask(service, session, [user("x")]))
    await asyncio.sleep(0.01)
    service.close(session.id)
    with pytest.raises(SessionNotFoundError, match="deleted while"):
        await running
    with pytest.raises(SessionNotFoundError):
        service.get(session.id)


async def test_limits(renderer) -> None:
    now = [0.0]
    engine = ScriptedEngine(renderer)
    config = SessionConfig(max_sessions=2, max_nodes=1, idle_timeout_s=10, max_context_tokens=60)
    service = SessionService(EngineSampler(engine), renderer, config, clock=lambda: now[0])
    session = service.open()
    service.open()
    with pytest.raises(SessionLimitError, match="2 sessions"):
        service.open()
    one = await ask(service, session, [user("x")])
    with pytest.raises(NodeLimitError, match="1 turns"):
        await ask(service, session, [user("x"), reply_of(one), user("y")])
    now[0] = 11.0
    service.get(session.id)
    now[0] = 15.0
    assert service.sweep() == 1
    other = service.open()
    with pytest.raises(ContextLengthError, match="maximum context length is 60 tokens"):
        await ask(service, other, [user("x" * 80)])
    await ask(service, other, [user("x" * 20)], max_tokens=500)
    prompt, params = engine.calls[-1]
    assert len(prompt) + params.max_new_tokens == 60


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": "required", "tools": []}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "whatever"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["", "x"]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"functions": []}, "functions"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ],
)
async def test_bad_requests_are_refused_with_their_field(renderer, fields, param) -> None:
    service, engine = make(renderer)
    session = service.open()
    data = {"model": "policy", "messages": as_json([user("x")]), **fields}
    with pytest.raises(BadRequestError) as caught:
        await service.chat(session.id, json.dumps(data).encode())
    assert caught.value.param == param
    assert caught.value.to_dict()["error"]["code"] == "invalid_request"
    assert engine.calls == []
    with pytest.raises(BadRequestError, match="request body"):
        await service.chat(session.id, b"{nope")


async def test_sampling_is_pinned_or_fixed_by_the_first_turn(renderer) -> None:
    service, engine = make(renderer)
    pinned = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=50, seed=5)
    session = service.open(OpenRequest(sampling=pinned))
    one = await ask(service, session, [user("x")], temperature=0.0, max_tokens=100, stop="\n\n")
    params = engine.calls[-1][1]
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.7, 0.9, 50)
    assert params.stop == ("\n\n",)
    await ask(service, session, [user("x"), reply_of(one), user("y")], max_tokens=7)
    assert engine.calls[-1][1].max_new_tokens == 7
    assert engine.calls[-1][1].seed != params.seed
    assert session.counters().sampling_overrides == 1
    assert service.trajectories(session.id)[0].sampling == pinned.transform

    free = service.open()
    one = await ask(service, free, [user("x")], temperature=0.5, seed=11)
    assert engine.calls[-1][1].seed == 11
    await ask(service, free, [user("x"), reply_of(one), user("y")])
    assert engine.calls[-1][1].temperature == 0.5
    with pytest.raises(BadRequestError, match=r"temperature: got 0.9, the session's first turn was sampled with 0.5"):
        await ask(service, free, [user("x"), reply_of(one), user("y")], temperature=0.9)


async def test_missing_routing_is_an_engine_fault(renderer) -> None:
    service, engine = make(renderer, record_routing=True, num_experts=4)
    session = service.open()
    with pytest.raises(UpstreamError, match="no routing"):
        await ask(service, session, [user("x")])
    engine.experts = (1, 1, 9)
    with pytest.raises(UpstreamError, match="expert ids leave"):
        await ask(service, session, [user("x")])


async def test_a_message_the_renderer_cannot_take_is_refused_before_anything_happens(renderer, monkeypatch) -> None:
    from miles_rollout.renderers import RenderRefusedError as Refused

    service, engine = make(renderer)
    session = service.open()

    def refuse(*args, **kwargs):
        raise Refused("merges", message_index=0, position=3, token="x", remedy="do not")

    monkeypatch.setattr(renderer, "render", refuse)
    with pytest.raises(RenderRefusedError, match="message 0, token 3"):
        await ask(service, session, [user("x")])
    assert engine.calls == []
