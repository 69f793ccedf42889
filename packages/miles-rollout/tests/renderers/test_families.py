"""What every family must do, and what each may refuse."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, overload

import pytest
from renderer_fixtures import DIALECTS, TOKENS_OF, folder_of, messages_from, renderer_of

from miles_contracts import FunctionCall, InvalidFieldError, Message, ToolCall
from miles_rollout.renderers import FAMILIES, RenderError, load_renderer
from miles_rollout.renderers.verify import verify_renderer
from miles_rollout.renderers.verify.conversations import TOOLS

QUESTION = Message(role="user", content="One?")
ANSWER = Message(role="assistant", content="First.", reasoning_content="Because.")
CALL = ToolCall(id="functions.add:0", function=FunctionCall(name="add", arguments='{"a": 1, "b": 2}'))


def ways(family: str) -> list[dict[str, Any]]:
    """The options under which a family is tried."""
    choices: Sequence[bool] = getattr(FAMILIES[family], "thinking_choices", ())
    return [{}, *({"thinking": c} for c in choices)]


@pytest.mark.parametrize(
    ("family", "options"), [(f, o) for f in DIALECTS for o in ways(f)], ids=lambda v: str(v).replace(" ", "")
)
def test_append_only(family: str, options: dict[str, Any]) -> None:
    report = verify_renderer(renderer_of(family, **options), random_count=3)
    assert report.ok, report.table()


class OnlyTheEnd(Sequence[int]):
    """A history that fails when anything before its last turn is read."""

    def __init__(self, ids: list[int], readable: int) -> None:
        self._ids, self._readable = ids, readable

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            assert index.start is not None
            assert index.start >= len(self._ids) - self._readable
            return self._ids[index]
        assert index % len(self._ids) >= len(self._ids) - self._readable
        return self._ids[index]


class OnlyTheLast(Sequence[Message]):
    """Messages of which only the last may be read."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        assert isinstance(index, int)
        assert index % len(self._messages) == len(self._messages) - 1
        return self._messages[index]


@pytest.mark.parametrize("family", DIALECTS)
def test_a_suffix_reads_the_last_turn_only(family: str) -> None:
    renderer = renderer_of(family)
    messages = [QUESTION, ANSWER] * 20
    ids = renderer.render(messages, add_generation_prompt=False)
    suffix = renderer.render_suffix(OnlyTheLast(messages), OnlyTheEnd(ids, 40), [QUESTION])
    assert suffix == renderer.render_suffix(messages, ids, [QUESTION])


@pytest.mark.parametrize("family", DIALECTS)
def test_the_tokens_of_a_message_do_not_depend_on_the_length_before_it(family: str) -> None:
    renderer = renderer_of(family)
    short = renderer.render_suffix([QUESTION, ANSWER], [renderer.stop_token_ids[0]], [QUESTION])
    long = renderer.render_suffix([QUESTION, ANSWER] * 9, [5, renderer.stop_token_ids[0]], [QUESTION])
    assert short == long


@pytest.mark.parametrize("family", DIALECTS)
def test_another_turn_may_be_asked_for_without_new_messages(family: str) -> None:
    renderer = renderer_of(family)
    history = [QUESTION, ANSWER]
    ids = renderer.render(history, add_generation_prompt=False)
    assert ids + renderer.render_suffix(history, ids, []) == renderer.render(history)


@pytest.mark.parametrize("family", DIALECTS)
def test_an_empty_history_is_a_rendering_of_the_whole(family: str) -> None:
    renderer = renderer_of(family)
    assert renderer.render_suffix([], [], [QUESTION], TOOLS) == renderer.render([QUESTION], TOOLS)


@pytest.mark.parametrize("family", DIALECTS)
def test_a_history_must_end_with_the_assistant(family: str) -> None:
    renderer = renderer_of(family)
    with pytest.raises(InvalidFieldError, match="history_messages"):
        renderer.render_suffix([QUESTION], [1, 2], [QUESTION])
    with pytest.raises(InvalidFieldError, match="history_ids"):
        renderer.render_suffix([QUESTION, ANSWER], [], [QUESTION])


@pytest.mark.parametrize("family", DIALECTS)
def test_an_unknown_role_is_refused_by_its_place(family: str) -> None:
    renderer = renderer_of(family)
    odd = Message(role="narrator", content="x")
    with pytest.raises(InvalidFieldError, match=r"messages\[1\]\.role: got 'narrator'"):
        renderer.render([QUESTION, odd])
    ids = renderer.render([QUESTION, ANSWER], add_generation_prompt=False)
    with pytest.raises(InvalidFieldError, match=r"messages\[2\]\.role"):
        renderer.render_suffix([QUESTION, ANSWER], ids, [odd])


@pytest.mark.parametrize("family", DIALECTS)
def test_a_question_without_text_is_refused(family: str) -> None:
    with pytest.raises(RenderError, match="content"):
        renderer_of(family).render([Message(role="user")])


@pytest.mark.parametrize("family", DIALECTS)
def test_a_tokenizer_of_another_family_is_refused(family: str) -> None:
    other = "glm" if TOKENS_OF[family] != "glm" else "qwen3"
    with pytest.raises(InvalidFieldError, match="family"):
        load_renderer(folder_of(other), family)


@pytest.mark.parametrize("family", DIALECTS)
def test_stop_tokens_are_distinct_and_end_turns(family: str) -> None:
    renderer = renderer_of(family)
    stops = renderer.stop_token_ids
    assert stops
    assert len(set(stops)) == len(stops)
    assert all(0 <= i < renderer.vocab_size for i in stops)


@pytest.mark.parametrize("family", DIALECTS)
def test_unknown_options_are_refused(family: str) -> None:
    renderer = renderer_of(family)
    with pytest.raises(InvalidFieldError, match="render options"):
        renderer.with_options(think=True)
    with pytest.raises(InvalidFieldError, match="reasoning_effort"):
        renderer.with_options(reasoning_effort="enormous")


@pytest.mark.parametrize(("family", "thinking"), [("chatml", True), ("minimax_m2", False), ("gpt_oss", False)])
def test_a_way_of_thinking_that_a_family_lacks_is_refused(family: str, thinking: bool) -> None:
    with pytest.raises(InvalidFieldError, match="thinking"):
        renderer_of(family, thinking=thinking)


@pytest.mark.parametrize(
    ("family", "effort", "text"),
    [
        ("gpt_oss", "low", "Reasoning: low\n"),
        ("deepseek_v4", "max", "Reasoning Effort: Absolute maximum"),
        ("inkling", "low", "Thinking effort level: 0.2"),
    ],
)
def test_efforts(family: str, effort: str, text: str) -> None:
    ids = renderer_of(family, reasoning_effort=effort).render([QUESTION])
    assert text in renderer_of(family).decode(ids)


def test_the_date_is_that_of_the_options() -> None:
    renderer = renderer_of("gpt_oss", today=datetime.date(2031, 2, 3))
    assert "Current date: 2031-02-03" in renderer.decode(renderer.render([QUESTION]))


@pytest.mark.parametrize("family", ["glm", "glm4_5"])
def test_glm_keeps_a_stop_token_that_opens_another_kind_of_turn(family: str) -> None:
    renderer = renderer_of(family)
    user, observation = (renderer.vocabulary.id(t) for t in ("<|user|>", "<|observation|>"))
    history = [QUESTION, Message(role="assistant", content="<tool_call>broken")]
    same = renderer.render_suffix(history, [9, user], [QUESTION])
    other = renderer.render_suffix(history, [9, observation], [QUESTION])
    assert other == [user, *same]


def test_gemma_goes_on_with_the_result_that_the_stop_token_opens() -> None:
    renderer = renderer_of("gemma4")
    opened, end = (renderer.vocabulary.id(t) for t in ("<|tool_response>", "<turn|>"))
    history = [QUESTION, Message(role="assistant", content="", tool_calls=(CALL,))]
    result = Message(role="tool", content="3", tool_call_id=CALL.id)
    suffix = renderer.render_suffix(history, [9, opened], [result])
    assert renderer.decode(suffix, skip_special_tokens=False) == 'response:add{value:<|"|>3<|"|>}<tool_response|>'
    interrupted = renderer.render_suffix(history, [9, opened], [QUESTION])
    assert interrupted[0] == end


@pytest.mark.parametrize("family", [f for f in DIALECTS if f not in ("chatml", "smollm2", "qwen3", "qwen3_next")])
def test_arguments_that_are_not_an_object(family: str) -> None:
    call = ToolCall(id="functions.add:0", function=FunctionCall(name="add", arguments="[1, 2"))
    messages = [QUESTION, Message(role="assistant", content=None, tool_calls=(call,))]
    renderer = renderer_of(family)
    if family in ("gpt_oss", "kimi_k2", "kimi_k2_5"):  # these write the text as it is
        assert "[1, 2" in renderer.decode(renderer.render(messages), skip_special_tokens=False)
    else:
        with pytest.raises(RenderError, match=r"arguments.*'\[1, 2' of 'add'"):
            renderer.render(messages)


@pytest.mark.parametrize("family", ["qwen3_5", "minimax_m2"])
def test_a_system_message_in_the_middle_is_refused_where_there_is_no_form_for_it(family: str) -> None:
    renderer = renderer_of(family)
    late = Message(role="system", content="x")
    with pytest.raises(RenderError, match=r"messages\[1\]\.role"):
        renderer.render([QUESTION, late])


def test_a_result_without_a_call_is_refused_where_it_needs_a_name() -> None:
    result = Message(role="tool", content="3", tool_call_id="x")
    with pytest.raises(RenderError, match="name of its tool"):
        renderer_of("gpt_oss").render([QUESTION, result])


def test_results_are_put_in_the_order_of_their_calls() -> None:
    second = ToolCall(id="functions.add:1", function=FunctionCall(name="add", arguments="{}"))
    history = [QUESTION, Message(role="assistant", content=None, tool_calls=(CALL, second))]
    results = [Message(role="tool", content=c.id, tool_call_id=c.id) for c in (CALL, second)]
    renderer = renderer_of("deepseek_v4")
    assert renderer.render([*history, *results]) == renderer.render([*history, *reversed(results)])


@pytest.mark.parametrize("family", ["qwen3", "glm", "deepseek_v4", "minimax_m2", "nemotron3"])
def test_reasoning_inside_the_content_counts_as_reasoning(family: str) -> None:
    renderer = renderer_of(family)
    apart = Message(role="assistant", content="First.", reasoning_content="Because.")
    inside = Message(role="assistant", content="<think>\nBecause.\n</think>\n\nFirst.")
    assert renderer.render([QUESTION, apart]) == renderer.render([QUESTION, inside])


def test_developer_and_system_share_a_form_where_there_is_only_one() -> None:
    for family in ("chatml", "qwen3", "nemotron3", "minimax_m2"):
        renderer = renderer_of(family)
        pair = (
            messages_from([{"role": "system", "content": "S"}]),
            messages_from([{"role": "developer", "content": "S"}]),
        )
        assert renderer.render([*pair[0], QUESTION]) == renderer.render([*pair[1], QUESTION])
