"""A turn is rendered, sampled and committed: what history becomes, and what is trained."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from service_driving import ask, make, reply_of
from session_factories import WEATHER, assistant, system, tool, user

from miles_contracts import EngineUnavailableError, Status
from miles_rollout.session import OpenRequest, Policy, audit
from miles_rollout.session.errors import (
    BadRequestError,
    HistoryDivergedError,
    SessionBusyError,
    TruncatedTurnError,
    UpstreamUnavailableError,
)


async def test_two_turns_share_their_prefix_and_only_the_suffix_is_rendered(renderer) -> None:
    service, engine = make(renderer, ["<think>\nhm\n</think>\n\nHello", "Bye"])
    session = service.open()
    first = [system("be brief"), user("hi")]
    one = await ask(service, session, first)
    assert reply_of(one) == {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    assert one["choices"][0]["finish_reason"] == "stop"
    await ask(service, session, [*first, reply_of(one), user("bye")])

    (prompt_1, _), (prompt_2, _) = engine.calls
    said_1 = next(iter(engine.said.values()))[1]
    assert prompt_1 == renderer.render(first)
    assert prompt_2[: len(prompt_1) + len(said_1)] == prompt_1 + said_1
    history = [*first, assistant("Hello", reasoning="hm")]
    assert prompt_2[len(prompt_1 + said_1) :] == renderer.render_suffix(history, prompt_1 + said_1, [user("bye")])

    (trajectory,) = service.trajectories(session.id)
    assert trajectory.token_ids.tolist() == prompt_2 + list(engine.said.values())[1][1]
    assert [(t.start, t.end) for t in trajectory.turns] == [
        (len(prompt_1), len(prompt_1 + said_1)),
        (len(prompt_2), trajectory.num_tokens),
    ]
    for (asked, said, logprobs), turn in zip(engine.said.values(), trajectory.turns, strict=True):
        assert trajectory.token_ids[: turn.start].tolist() == asked
        assert trajectory.token_ids[turn.start : turn.end].tolist() == said
        assert trajectory.logprobs[turn.start : turn.end].tolist() == np.float32(logprobs).tolist()
        assert trajectory.loss_mask[turn.start : turn.end].all()
    assert trajectory.num_trained == sum(len(s) for _, s, _ in engine.said.values())
    assert trajectory.status is Status.FINISHED
    assert trajectory.oldest_version == 3
    report = audit([trajectory])
    assert (report.tokens_audited, report.mismatches, report.turns) == (trajectory.num_trained, 0, 2)


async def test_tools_and_repairs(renderer) -> None:
    calls = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
    service, engine = make(renderer, [f"<think>\nlook\n</think>\n\nLet me see.\n{calls}", "Rain."])
    session = service.open()
    first = [user("weather?")]
    one = await ask(service, session, first, tools=[WEATHER])
    message = reply_of(one)
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    copy = {
        "role": "assistant",
        "content": message["content"].strip() + " ",
        "tool_calls": [
            {
                "id": "my-id",
                "type": "function",
                "index": 0,
                "function": {"name": "weather", "arguments": '{"days":1.0,"city":"Oslo"}'},
            }
        ],
    }
    await ask(service, session, [*first, copy, tool("rain", "my-id")], tools=[WEATHER])
    (trajectory,) = service.trajectories(session.id)
    assert len(trajectory.turns) == 2
    assert trajectory.num_trained == sum(len(s) for _, s, _ in engine.said.values())
    counters = session.counters()
    assert counters.repairs == {
        "arguments_reserialised": 1,
        "reasoning_omitted": 1,
        "tool_call_ids_rewritten": 1,
        "whitespace_edges": 1,
    }
    # The rewritten id is translated back: what is stored is one consistent history.
    assert session.tree.tip.messages[0].tool_call_id == message["tool_calls"][0]["id"]


async def test_repairs_can_be_switched_off(renderer) -> None:
    service, _ = make(renderer, ["<think>\nhm\n</think>\n\nHello"], repairs=frozenset())
    session = service.open()
    await ask(service, session, [user("hi")])
    with pytest.raises(HistoryDivergedError) as caught:
        await ask(service, session, [user("hi"), assistant("Hello"), user("bye")])
    assert caught.value.message_index == 1
    assert caught.value.field == "reasoning_content"


async def test_a_retry_abandons_the_first_attempt_only_once_it_succeeds(renderer) -> None:
    service, _engine = make(renderer, ["first", EngineUnavailableError("e", "down"), "second"])
    session = service.open()
    await ask(service, session, [user("hi")])
    with pytest.raises(UpstreamUnavailableError):
        await ask(service, session, [user("hi")])
    assert session.counters().abandoned_turns == 0
    assert len(service.trajectories(session.id)) == 1
    await ask(service, session, [user("hi")])
    (trajectory,) = service.trajectories(session.id)
    assert "second" in renderer.decode(trajectory.token_ids.tolist())
    assert "first" not in renderer.decode(trajectory.token_ids.tolist())
    counters = session.counters()
    assert (counters.abandoned_turns, counters.abandoned_tokens) == (1, 6)


async def test_a_truncated_turn_cannot_be_continued_but_retried(renderer) -> None:
    service, _ = make(renderer, ["a long answer", "short"])
    session = service.open()
    one = await ask(service, session, [user("hi")], max_tokens=4)
    assert one["choices"][0]["finish_reason"] == "length"
    assert service.trajectories(session.id)[0].status is Status.TRUNCATED
    with pytest.raises(TruncatedTurnError, match="cut by its length limit after 4 tokens"):
        await ask(service, session, [user("hi"), reply_of(one), user("go on")])
    await ask(service, session, [user("hi")])
    (trajectory,) = service.trajectories(session.id)
    assert trajectory.status is Status.FINISHED
    assert session.counters().truncated_turns == 1


async def test_a_whole_budget_is_truncated_whatever_engine_and_parser_say(renderer) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    service, engine = make(renderer)
    ids = engine.ids_of(call)
    engine.replies = [ids, [*ids, renderer.vocabulary.id("<|im_end|>")]]
    session = service.open()
    one = await ask(service, session, [user("hi")], tools=[WEATHER], max_tokens=len(ids))
    assert one["choices"][0]["finish_reason"] == "length"
    assert reply_of(one)["tool_calls"]
    two = await ask(service, session, [user("hi")], tools=[WEATHER], max_tokens=len(ids) + 1)
    assert two["choices"][0]["finish_reason"] == "tool_calls"  # it ended with a stop token, on its last token


async def test_a_malformed_call_is_delivered_as_content_with_a_status(renderer) -> None:
    service, _ = make(renderer, ["Look: <tool_call>\n{not json\n</tool_call>"])
    session = service.open()
    answer = await ask(service, session, [user("hi")], tools=[WEATHER])
    assert "{not json" in reply_of(answer)["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["miles"]["malformed_tool_calls"]) == 1
    assert session.counters().malformed_calls == 1


async def test_compaction_branches_and_both_sides_are_trained(renderer) -> None:
    service, engine = make(renderer, ["one", "two", "three"], policy=Policy.BRANCHING)
    session = service.open()
    messages = [system("s"), user("a")]
    one = await ask(service, session, messages)
    messages += [reply_of(one), user("b")]
    await ask(service, session, messages)
    compacted = [system("s"), user("summary of a and b"), user("c")]
    await ask(service, session, compacted)
    found = service.trajectories(session.id)
    assert [len(t.turns) for t in found] == [2, 1]
    assert sum(t.num_trained for t in found) == sum(len(s) for _, s, _ in engine.said.values())
    assert session.counters().branches == 1
    assert audit(found).mismatches == 0

    linear = service.open(OpenRequest(policy=Policy.LINEAR))
    await ask(service, linear, [system("s"), user("a")])
    with pytest.raises(HistoryDivergedError, match=r"messages\[1\].content differs") as caught:
        await ask(service, linear, compacted)
    assert (caught.value.message_index, caught.value.field) == (1, "content")


async def test_a_shared_turn_is_trained_in_one_leaf_only(renderer) -> None:
    service, engine = make(renderer, ["A", "B", "C", "D"], policy=Policy.BRANCHING)
    session = service.open()
    one = await ask(service, session, [user("x")])
    await ask(service, session, [user("x"), reply_of(one), user("left")])
    await ask(service, session, [user("x"), reply_of(one), user("right")])
    left, right = service.trajectories(session.id)
    assert left.identity.leaf == 0
    assert right.identity.leaf == 1
    start, end = left.turns[0].start, left.turns[0].end
    assert left.loss_mask[start:end].all()
    assert not right.loss_mask[start:end].any()
    assert right.logprobs[start:end].tolist() == left.logprobs[start:end].tolist()
    assert left.num_trained + right.num_trained == sum(len(s) for _, s, _ in engine.said.values())
    # A second sample of the right leaf's prompt is a retry: the first is abandoned.
    await ask(service, session, [user("x"), reply_of(one), user("right")])
    found = service.trajectories(session.id)
    assert len(found) == 2
    assert session.counters().abandoned_turns == 1


async def test_parallel_samples_of_one_prompt_are_no_retries(renderer) -> None:
    service, engine = make(renderer, ["A", "B", "C", "D"], policy=Policy.BRANCHING)
    session = service.open()
    engine.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, engine.gate.set)
    await asyncio.gather(*(ask(service, session, [user("x")], temperature=t) for t in (1.0, 1.0)))
    assert len(service.trajectories(session.id)) == 2
    assert session.counters().abandoned_turns == 0

    session = service.open()
    engine.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, engine.gate.set)
    asked = (ask(service, session, [user("x")], temperature=t) for t in (1.0, 0.5))
    _one, two = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(two, SessionBusyError), "log-probs of one session are of one transform"
    assert len(service.trajectories(session.id)) == 1


async def test_thinking_is_a_property_of_the_session(renderer) -> None:
    service, engine = make(renderer)
    session = service.open()
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    one = await ask(service, session, [user("x")], **off)
    assert engine.calls[-1][0] == renderer.with_options(thinking=False).render([user("x")])
    await ask(service, session, [user("x"), reply_of(one), user("y")])
    with pytest.raises(BadRequestError, match="thinking"):
        await ask(service, session, [user("x")], chat_template_kwargs={"enable_thinking": True})


async def test_stop_strings_end_the_view_not_the_tokens(renderer) -> None:
    service, engine = make(renderer)
    engine.replies = [engine.ids_of("Answer END")]
    session = service.open()
    answer = await ask(service, session, [user("x")], stop="END")
    assert reply_of(answer)["content"] == "Answer "
    await ask(service, session, [user("x"), assistant("Answer"), user("y")])
    prompt = renderer.decode(engine.calls[-1][0], skip_special_tokens=False)
    assert "Answer END<|im_end|>\n<|im_start|>user\ny" in prompt
    assert session.counters().repairs == {"whitespace_edges": 1}


async def test_tool_choice_none_delivers_calls_as_text(renderer) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    service, _ = make(renderer, [call])
    session = service.open()
    answer = await ask(service, session, [user("x")], tools=[WEATHER], tool_choice="none")
    assert "tool_calls" not in reply_of(answer)
    assert '"city": "Oslo"' in reply_of(answer)["content"]


async def test_changed_tools_are_another_history(renderer) -> None:
    service, _ = make(renderer)
    session = service.open()
    one = await ask(service, session, [user("x")], tools=[WEATHER])
    with pytest.raises(HistoryDivergedError) as caught:
        await ask(service, session, [user("x"), reply_of(one), user("y")])
    assert caught.value.field == "tools"
    branching = service.open(OpenRequest(policy=Policy.BRANCHING))
    one = await ask(service, branching, [user("x")], tools=[WEATHER])
    await ask(service, branching, [user("x"), reply_of(one), user("y")])
    assert [len(t.turns) for t in service.trajectories(branching.id)] == [1, 1]
    assert branching.counters().demoted_messages == 1


async def test_routing_rows_come_from_the_request_that_fed_the_token(renderer) -> None:
    service, engine = make(renderer, record_routing=True, num_experts=300)
    engine.experts = (2, 3, 300)
    session = service.open()
    one = await ask(service, session, [user("x")])
    await ask(service, session, [user("x"), reply_of(one), user("y")])
    (trajectory,) = service.trajectories(session.id)
    assert trajectory.routing is not None
    assert trajectory.routing.expert_ids.dtype == np.uint16
    fed = trajectory.token_ids[:-1].astype(np.int64)
    want = (fed[:, None, None] + np.arange(6).reshape(2, 3)) % 300
    assert np.array_equal(trajectory.routing.expert_ids, want)
    held = sum(n.routing.shape[0] for n in session.tree.nodes)
    assert held == trajectory.num_tokens - 1  # nothing is held twice


async def test_token_level_completions(renderer) -> None:
    service, engine = make(renderer)
    session = service.open()
    prompt = [1, 2, 3]
    engine.replies = [[7, 8], [9]]

    async def complete(ids, **fields):
        return await service.complete(session.id, json.dumps({"model": "m", "prompt": ids, **fields}).encode())

    answer, _ = await complete(prompt)
    assert answer.node.sampled.output_ids.tolist() == [7, 8]
    await complete([1, 2, 3, 7, 8, 4])
    (trajectory,) = service.trajectories(session.id)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 9]
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False, True]
    with pytest.raises(HistoryDivergedError, match="position 2"):
        await complete([1, 2, 4])
    with pytest.raises(BadRequestError, match="adds nothing"):
        await complete([1, 2, 3, 7, 8, 4, 9])
    with pytest.raises(BadRequestError, match="token ids"):
        await complete("text")
    with pytest.raises(BadRequestError, match="leaves"):
        await complete([-1])
    with pytest.raises(BadRequestError, match="token-level turns"):
        await ask(service, session, [user("x")])
    engine.replies = [[5]]
    await complete([1, 2, 3, 7, 8, 4])
    assert service.trajectories(session.id)[0].token_ids.tolist() == [1, 2, 3, 7, 8, 4, 5]
    assert session.counters().abandoned_turns == 1
