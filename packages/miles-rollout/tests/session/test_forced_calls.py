"""A forced call is opened in the prompt: its opening is not trained, what follows is, and history goes on as ever."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import aiohttp
import pytest
from service_driving import ask, make, reply_of
from session_factories import WEATHER, assistant, tool, user, write_tokenizer
from session_factories import call as make_call
from session_serving import serving

from miles_contracts import Status
from miles_rollout.renderers import CallOpeningError, load_renderer
from miles_rollout.session import OpenRequest, Policy, audit
from miles_rollout.session.errors import BadRequestError, TruncatedTurnError
from miles_rollout.session.responses import chat_body

NEWS = {"type": "function", "function": {"name": "news", "parameters": {"type": "object", "properties": {}}}}
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>")
NAMED = {"type": "function", "function": {"name": "weather"}}
OPENING = '<tool_call>\n{"name": "weather", "arguments": {'
REST = '"city": "Oslo"}}\n</tool_call>'


def text_of(renderer, ids) -> str:
    return renderer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize(("choice", "tools"), [(NAMED, [WEATHER, NEWS]), ("required", [WEATHER])])
async def test_a_named_call(renderer, choice, tools) -> None:
    service, engine = make(renderer, [REST])
    session = service.open()
    answer = await ask(service, session, [user("Oslo?")], tools=tools, tool_choice=choice)
    (call,) = reply_of(answer)["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Oslo"})
    assert reply_of(answer)["content"] is None
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (prompt, _), (_, said, _) = engine.calls[0], next(iter(engine.said.values()))
    assert text_of(renderer, prompt).endswith(f"<|im_start|>assistant\n{OPENING}")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == len(said)
    # The ids are those of the whole rendered at once, and the sampled ones alone are trained.
    called = assistant("", calls=[_call(call)])
    assert prompt + said == renderer.render([user("Oslo?"), called], tools, add_generation_prompt=False)[:-1]
    (trajectory,) = service.trajectories(session.id)
    assert trajectory.token_ids.tolist() == prompt + said
    assert trajectory.loss_mask.tolist() == [False] * len(prompt) + [True] * len(said)
    assert audit([trajectory]).mismatches == 0
    counters = session.counters()
    assert (counters.forced_calls, counters.relaxed_tool_choices, counters.malformed_calls) == (1, 0, 0)
    opening = session.describe()["nodes"][0]["forced_tokens"]
    assert text_of(renderer, prompt[-opening:]) == OPENING


def _call(call):
    return make_call(call["function"]["name"], call["function"]["arguments"], call["id"])


async def test_any_call_of_several_tools(renderer) -> None:
    service, engine = make(renderer, ['"news", "arguments": {}}\n</tool_call>'])
    session = service.open()
    answer = await ask(service, session, [user("?")], tools=[WEATHER, NEWS], tool_choice="required")
    assert reply_of(answer)["tool_calls"][0]["function"]["name"] == "news"
    assert text_of(renderer, engine.calls[0][0]).endswith('<tool_call>\n{"name": ')


async def test_a_call_that_may_be_empty_is_opened_before_its_arguments(renderer) -> None:
    service, engine = make(renderer, ["{}}\n</tool_call>"])
    session = service.open()
    choice = {"type": "function", "function": {"name": "news"}}
    answer = await ask(service, session, [user("?")], tools=[NEWS], tool_choice=choice)
    assert reply_of(answer)["tool_calls"][0]["function"] == {"name": "news", "arguments": "{}"}
    assert text_of(renderer, engine.calls[0][0]).endswith('"arguments": ')


async def test_history_goes_on_behind_a_forced_call(renderer) -> None:
    """Repairs, a retry and the next turns see the call as if all of it had been sampled."""
    service, engine = make(renderer, ["<think>\nhm\n</think>\n\nHello", REST, "Rain.", "Again."])
    session = service.open()
    first = await ask(service, session, [user("hi")], tools=[WEATHER])
    history = [user("hi"), {"role": "assistant", "content": reply_of(first)["content"]}, user("Oslo?")]
    forced = await ask(service, session, history, tools=[WEATHER], tool_choice="required")
    said = [s for _, s, _ in engine.said.values()]
    function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    copy = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "mine", "type": "function", "function": function}],
    }
    history += [copy, tool("rain", "mine")]
    for _ in range(2):  # the second time as a retry
        await ask(service, session, history, tools=[WEATHER])
    stored = engine.calls[1][0] + said[1]
    assert engine.calls[2][0] == engine.calls[3][0]
    assert engine.calls[2][0][: len(stored)] == stored
    call = reply_of(forced)["tool_calls"][0]
    messages = [
        user("hi"),
        assistant("Hello", reasoning="hm"),
        user("Oslo?"),
        assistant("", calls=[_call(call)]),
        tool("rain", call["id"]),
    ]
    assert engine.calls[2][0] == renderer.render(messages, [WEATHER])
    (trajectory,) = service.trajectories(session.id)
    last = list(engine.said.values())[-1][1]
    assert [t.end - t.start for t in trajectory.turns] == [len(s) for s in (*said, last)]
    assert trajectory.num_trained == sum(t.end - t.start for t in trajectory.turns)
    assert audit([trajectory]).mismatches == 0
    counters = session.counters()
    assert counters.repairs == {"arguments_reserialised": 1, "reasoning_omitted": 1, "tool_call_ids_rewritten": 1}
    assert (counters.forced_calls, counters.abandoned_turns) == (1, 1)


async def test_branches_behind_a_forced_call(renderer) -> None:
    service, engine = make(renderer, [REST, "a", "b"])
    session = service.open(OpenRequest(policy=Policy.BRANCHING))
    forced = await ask(service, session, [user("Oslo?")], tools=[WEATHER], tool_choice=NAMED)
    call = reply_of(forced)["tool_calls"][0]["id"]
    for result in ("rain", "sun"):
        await ask(service, session, [user("Oslo?"), reply_of(forced), tool(result, call)], tools=[WEATHER])
    found = service.trajectories(session.id)
    assert [len(t.turns) for t in found] == [2, 2]
    assert sum(t.num_trained for t in found) == sum(len(s) for _, s, _ in engine.said.values())
    assert audit(found).mismatches == 0


async def test_a_malformed_continuation_is_content_with_its_opening(renderer) -> None:
    service, _ = make(renderer, ["oops}"])
    session = service.open()
    answer = await ask(service, session, [user("Oslo?")], tools=[WEATHER], tool_choice=NAMED)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": f"{OPENING}oops}}"}
    assert choice["finish_reason"] == "stop"
    assert "not JSON" in choice["miles"]["malformed_tool_calls"][0]
    assert session.counters().malformed_calls == 1


async def test_reasoning_tags_inside_the_arguments_are_arguments(renderer) -> None:
    service, _ = make(renderer, ['"city": "</think> Oslo"}}\n</tool_call>'])
    answer = await ask(service, service.open(), [user("?")], tools=[WEATHER], tool_choice=NAMED)
    message = reply_of(answer)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "</think> Oslo"}
    assert "reasoning_content" not in message


async def test_a_length_limit_inside_a_forced_call(renderer) -> None:
    service, _ = make(renderer, [REST, REST])
    session = service.open()
    answer = await ask(service, session, [user("Oslo?")], tools=[WEATHER], tool_choice=NAMED, max_tokens=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert reply_of(answer)["content"] == f'{OPENING}"city'
    assert service.trajectories(session.id)[0].status is Status.TRUNCATED
    with pytest.raises(TruncatedTurnError):
        await ask(service, session, [user("Oslo?"), reply_of(answer), user("go on")], tools=[WEATHER])
    again = await ask(service, session, [user("Oslo?")], tools=[WEATHER], tool_choice=NAMED)
    assert reply_of(again)["tool_calls"]
    assert service.trajectories(session.id)[0].num_trained == again["usage"]["completion_tokens"]


@pytest.mark.parametrize("stop", ["weather", "\n", "{", "<tool_call>"])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_are_for_what_is_sampled(renderer, stop, stream) -> None:
    service, _ = make(renderer, ['"city": "Oslo" and no end'])
    settings = {"tools": [WEATHER], "tool_choice": NAMED, "stop": [stop], "stream": stream}
    answer = await ask(service, service.open(), [user("Oslo?")], **settings)
    assert reply_of(answer)["content"] == f'{OPENING}"city": "Oslo" and no end'


async def test_a_stop_string_that_is_sampled_cuts_behind_the_opening(renderer) -> None:
    service, _ = make(renderer, ['"city": "weather", and no end'])
    settings = {"tools": [WEATHER], "tool_choice": NAMED, "stop": ["weather"]}
    answer = await ask(service, service.open(), [user("Oslo?")], **settings)
    assert reply_of(answer)["content"] == f'{OPENING}"city": "'


async def test_thinking_off_keeps_its_empty_block_before_the_call(renderer) -> None:
    service, engine = make(renderer, [REST])
    session = service.open(OpenRequest(thinking=False))
    await ask(service, session, [user("Oslo?")], tools=[WEATHER], tool_choice=NAMED)
    assert text_of(renderer, engine.calls[0][0]).endswith(f"<think>\n\n</think>\n\n{OPENING}")


async def test_what_cannot_be_opened_is_refused_or_served_as_auto(renderer, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise CallOpeningError("there is no exact opening")

    monkeypatch.setattr(renderer, "render_call", refuse)
    service, engine = make(renderer)
    with pytest.raises(BadRequestError, match="family qwen3: there is no exact opening") as caught:
        await ask(service, service.open(), [user("x")], tools=[WEATHER], tool_choice="required")
    assert caught.value.param == "tool_choice"
    assert engine.calls == []
    service, engine = make(renderer, ["no call"], best_effort_tool_choice=True)
    session = service.open()
    await ask(service, session, [user("x")], tools=[WEATHER], tool_choice="required")
    assert engine.calls[0][0] == renderer.render([user("x")], [WEATHER])
    assert (session.counters().relaxed_tool_choices, session.counters().forced_calls) == (1, 0)


async def test_log_probs_are_those_of_the_sampled_tokens(renderer) -> None:
    service, engine = make(renderer, [REST])
    answer = await ask(service, service.open(), [user("?")], tools=[WEATHER], tool_choice=NAMED, logprobs=True)
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(next(iter(engine.said.values()))[1])


@pytest.mark.parametrize("live", [True, False])
async def test_the_official_client(renderer, live) -> None:
    openai = pytest.importorskip("openai")
    async with serving(renderer, [REST, REST, "Rain."], live_streams=live) as (server, _):
        session = server.service.open()
        async with openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0) as client:
            messages: list = [{"role": "user", "content": "Oslo?"}]
            asked = {"model": "policy", "tools": [WEATHER], "tool_choice": NAMED}
            with pytest.raises(openai.BadRequestError, match="none of the request's tools"):
                await client.chat.completions.create(
                    messages=messages, **(asked | {"tool_choice": {"type": "function", "function": {"name": "f"}}})
                )
            first = await client.chat.completions.create(messages=messages, **asked)
            assert first.choices[0].message.tool_calls[0].function.name == "weather"
            # Streamed, as a retry: the name comes first, then the arguments.
            stream = await client.chat.completions.create(messages=messages, stream=True, **asked)
            deltas = [c.choices[0].delta async for c in stream]
            pieces = [d.tool_calls[0] for d in deltas if d.tool_calls]
            assert pieces[0].function.name == "weather"
            assert json.loads("".join(p.function.arguments for p in pieces)) == {"city": "Oslo"}
            assert not any(d.content for d in deltas)
            call = {"name": "weather", "arguments": "".join(p.function.arguments for p in pieces)}
            messages += [
                {"role": "assistant", "tool_calls": [{"id": pieces[0].id, "type": "function", "function": call}]},
                {"role": "tool", "content": "rain", "tool_call_id": pieces[0].id},
            ]
            last = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
            assert last.choices[0].message.content == "Rain."
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as response:
            assert "miles_session_forced_calls_total 2" in await response.text()
        (trajectory,) = server.service.trajectories(session.id)
        assert audit([trajectory]).mismatches == 0
        assert session.counters().repairs == {}


async def test_the_answer_on_the_wire_is_what_the_service_says(renderer) -> None:
    service, _ = make(renderer, [REST])
    session = service.open()
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [WEATHER], "tool_choice": NAMED}
    answer, _ = await service.chat(session.id, json.dumps(body).encode())
    assert json.loads(chat_body(answer))["choices"][0]["message"]["tool_calls"][0]["id"].startswith("call_")


async def test_a_name_that_the_policy_goes_on_writing_is_told() -> None:
    """GLM marks no end of a tool's name when the call may have no arguments."""
    tools = [{"type": "function", "function": {"name": "news", "parameters": {}}}]
    choice = {"type": "function", "function": {"name": "news"}}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), added=GLM)
        glm = load_renderer(Path(folder), "glm")
    stop = glm.vocabulary.id("<|observation|>")
    for said, name in (("</tool_call>", "news"), ("paper</tool_call>", "newspaper")):
        service, _ = make(glm, [[i for piece in glm.vocabulary.split(said) for i in _ids(glm, piece)] + [stop]])
        session = service.open()
        answer = await ask(service, session, [user("?")], tools=tools, tool_choice=choice)
        assert reply_of(answer)["tool_calls"][0]["function"]["name"] == name
        told = answer["choices"][0]["miles"].get("malformed_tool_calls", [])
        assert told == ([] if name == "news" else ["the call of 'news' became one of 'newspaper'"])
        assert session.counters().malformed_calls == len(told)


def _ids(renderer, piece):
    return [piece] if isinstance(piece, int) else renderer.vocabulary.encode(piece)
