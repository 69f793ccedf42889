"""Random conversations, as a session would have them: rendered once, then sampled and extended turn by turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderer_fixtures import DIALECTS, renderer_of

from miles_contracts import FunctionCall, Message, ToolCall
from miles_rollout.renderers import Renderer
from miles_rollout.renderers.verify.conversations import TOOLS

# Pieces that merge with each other, that look like control tokens, and any text at all.
PIECES = st.sampled_from(
    ["\n", "\n\n", " ", "a", "user", "<|im_end|>", "<think>", "</think>", "<|user|>", "<turn|>", "é", "🙂", "{", "}"]
)
TEXT = st.lists(PIECES | st.text(max_size=5), max_size=6).map("".join)
NAMES = st.sampled_from(["add", "search"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT, lambda v: st.lists(v, max_size=2), max_leaves=3
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "query", "tags"]), VALUES, max_size=3).map(json.dumps)


@dataclass
class Turn:
    """What the environment says before a turn, the turn as a message, and what is sampled for it."""

    asked: list[Message]
    answer: Message
    sampled: list[int] = field(default_factory=list)


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    out: list[Turn] = []
    pending: tuple[ToolCall, ...] = ()
    counter = 0
    for _ in range(draw(st.integers(2, 4))):
        asked = [Message(role="tool", content=draw(TEXT), tool_call_id=c.id, name=c.function.name) for c in pending]
        if not asked or draw(st.booleans()):
            asked.append(Message(role="user", content=draw(TEXT)))
        calls = []
        for _ in range(draw(st.integers(0, 2))):
            name = draw(NAMES)
            call = FunctionCall(name=name, arguments=draw(ARGUMENTS))
            calls.append(ToolCall(id=f"functions.{name}:{counter}", function=call))
            counter += 1
        pending = tuple(calls)
        answer = Message(role="assistant", content=draw(TEXT), reasoning_content=draw(TEXT) or None, tool_calls=pending)
        out.append(Turn(asked, answer, draw(st.lists(st.integers(0, 400), max_size=8))))
    return out


@pytest.mark.parametrize("family", DIALECTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=turns(), data=st.data())
def test_a_trajectory_grown_turn_by_turn(family: str, conversation: list[Turn], data: st.DataObject) -> None:
    """History stays, whatever was sampled; each appended part is what a rendering of the whole has in its place."""
    renderer = renderer_of(family)
    messages: list[Message] = []
    ids: list[int] = []
    for turn in conversation:
        before = list(ids)
        suffix = (
            renderer.render_suffix(messages, ids, turn.asked, TOOLS) if messages else renderer.render(turn.asked, TOOLS)
        )
        ids = before + suffix
        messages += turn.asked
        whole = renderer.render(messages, TOOLS)
        shared = min(len(suffix), len(whole)) - _sampled_part_of(renderer, suffix, before)
        assert suffix[len(suffix) - shared :] == whole[len(whole) - shared :]
        stop = data.draw(st.sampled_from([*renderer.stop_token_ids, None]))
        ids += [*turn.sampled, *([] if stop is None else [stop])] or [0]
        messages.append(turn.answer)


def _sampled_part_of(renderer: Renderer, suffix: list[int], before: list[int]) -> int:
    """Ids at the front of a suffix that close the sampled turn and that another ending would not need."""
    return 1 if before and suffix and suffix[0] in renderer.stop_token_ids else 0


@pytest.mark.parametrize("family", DIALECTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=turns())
def test_a_longer_conversation_extends_a_shorter_one(family: str, conversation: list[Turn]) -> None:
    renderer = renderer_of(family)
    messages: list[Message] = []
    shorter: list[int] = []
    for turn in conversation:
        messages += turn.asked
        whole = renderer.render(messages, TOOLS)
        assert whole[: len(shorter)] == shorter
        messages.append(turn.answer)
        shorter = _sampled(renderer, messages)


def _sampled(renderer: Renderer, messages: list[Message]) -> list[int]:
    """Ids up to the end of the last turn; what a template puts behind it may depend on what follows."""
    ids = renderer.render(messages, TOOLS, add_generation_prompt=False)
    for end in range(len(ids), len(ids) - 3, -1):
        if ids[end - 1] in renderer.stop_token_ids:
            return ids[:end]
    return ids


@pytest.mark.parametrize("family", DIALECTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXT)
def test_no_text_makes_or_ends_a_turn(family: str, text: str) -> None:
    """Whatever a question or a result says, the control tokens are those of an empty one."""
    renderer = renderer_of(family)
    controls = {renderer.vocabulary.added[t] for t in renderer.vocabulary.special} | set(renderer.stop_token_ids)

    def structure(said: str) -> list[int]:
        ids = renderer.render([Message(role="system", content=said), Message(role="user", content=said)], TOOLS)
        return [i for i in ids if i in controls]

    assert structure(text) == structure("x")
