"""The conversations a renderer is tried on: a fixed suite of what harnesses do, and random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_contracts import FunctionCall, Message, ToolCall


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation, with at least three assistant turns in the fixed suite.

    Attributes:
        name: what is particular about it.
        messages: the whole of it.
        tools: OpenAI tool objects.
        required: a family may not say that it has no form for this.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    required: bool = False


TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "First"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the notes.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for"},
                    "limit": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "exact": {"type": "boolean"},
                },
                "required": ["query"],
            },
        },
    },
)


def _system(text: str) -> Message:
    return Message(role="system", content=text)


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _assistant(text: str | None, reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text, reasoning_content=reasoning, tool_calls=calls)


def _call(counter: int, name: str, **arguments: Any) -> ToolCall:
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"functions.{name}:{counter}", function=FunctionCall(name=name, arguments=text))


def _result(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.function.name)


_ONE = _call(0, "add", a=1, b=2)
_TWO = _call(1, "search", query="größe", limit=2.5)
_THREE = _call(2, "add", a=3, b=4)
_ODD = _call(3, "search", query='"quoted" {x}\n</tool_call>', tags=["a", "b"], exact=True)
_QUESTIONS = tuple(_user(text) for text in ("One?", "Two?", "Three?"))
_ANSWERS = tuple(_assistant(text) for text in ("First.", "Second.", "Third."))
_PLAIN = tuple(message for pair in zip(_QUESTIONS, _ANSWERS, strict=True) for message in pair)


def standard_conversations() -> tuple[Conversation, ...]:
    """The fixed suite."""
    return (*_with_text(), *_with_calls(), *_with_odd_text())


def _with_text() -> Iterator[Conversation]:
    thinking = [_assistant(m.content, f"Because {m.content}\n\nSo be it.") for m in _ANSWERS]
    reasoned = tuple(m for pair in zip(_QUESTIONS, thinking, strict=True) for m in pair)
    yield Conversation(name="questions and answers", messages=_PLAIN, required=True)
    yield Conversation(name="reasoning in every turn", messages=reasoned, required=True)
    yield Conversation(name="system message first", messages=(_system("Be brief."), *_PLAIN))
    middle = (*_PLAIN[:2], _system("Now in French."), *_PLAIN[2:4], _system("Stop."), *_PLAIN[4:])
    yield Conversation(name="system message in the middle", messages=middle)
    asked = (*_PLAIN[:2], _user("Well?"), *_PLAIN[2:], _user("So?"), _user("And?"), _assistant("No."))
    yield Conversation(name="user after user", messages=asked)
    yield Conversation(name="assistant after assistant", messages=(*_PLAIN[:2], _assistant("And more."), *_PLAIN[2:]))


def _with_calls() -> Iterator[Conversation]:
    chain = [_system("Use tools."), _user("Add, then search.")]
    chain += [_assistant("", "Add first.", _ONE), _result(_ONE, "3")]
    chain += [_assistant("Now the notes.", "Then search.", _TWO), _result(_TWO, "nothing\nfound")]
    chain += [_assistant("Three; no notes.", "Done."), _user("Thanks."), _assistant("Welcome.")]
    yield Conversation(name="one call a turn", messages=tuple(chain), tools=TOOLS)
    several = [_user("All at once."), _assistant(None, "Three calls.", _ONE, _TWO, _THREE)]
    several += [_result(_ONE, "3"), _result(_TWO, "none"), _result(_THREE, "7")]
    several += [_assistant("", "Once more.", _THREE), _result(_THREE, "7"), _assistant("7.", "Good.")]
    yield Conversation(name="several calls in one turn", messages=tuple(several), tools=TOOLS)
    errors = [_user("Go."), _assistant("", "Try.", _ODD), _result(_ODD, "Error: <tool_call> is not allowed\n")]
    errors += [_assistant("", "Again.", _ONE), _result(_ONE, ""), _assistant("Failed.")]
    errors += [_user("Why?"), _assistant("Odd.")]
    yield Conversation(name="tool errors and odd arguments", messages=tuple(errors), tools=TOOLS)
    call = _assistant("", "Call.", _ONE)
    yield Conversation(name="question after a call", messages=(_PLAIN[0], call, *_PLAIN[2:]), tools=TOOLS)
    answered = (_user("Go."), call, _result(_ONE, "3"), *_PLAIN[2:])
    yield Conversation(name="question after results", messages=answered, tools=TOOLS)


def _with_odd_text() -> Iterator[Conversation]:
    empty = [_user(""), _assistant(""), _user("?"), _assistant("", "Nothing."), _user(""), _assistant("x")]
    yield Conversation(name="empty content", messages=tuple(empty))
    edges = [_user("\n\n  hi \n"), _assistant("  indented\n\n"), _user("\t")]
    edges += [_assistant("\n\nlate\n", "\n  deep \n"), _user(" \n"), _assistant("end ")]
    yield Conversation(name="white space at the edges", messages=tuple(edges))
    letters = [_system("Größe ≠ 大小"), _user("naïve cafe\u0301 👩‍👩‍👧 \u202eabc\u202c")]
    letters += [_assistant("日本語\u3000です", "思考"), _user("\ud7ff\U0010ffff"), _assistant("ﬁ ≠ fi")]
    letters += [_user("a\u0000b"), _assistant("🫠")]
    yield Conversation(name="unicode", messages=tuple(letters))


@dataclass
class _Source:
    """Draws conversations from a seed."""

    rng: random.Random
    counter: int = 0
    open_calls: list[ToolCall] = field(default_factory=list)

    def text(self) -> str:
        words = ["hi", "the", "\n", "\n\n", " ", "  ", "é", "大", "🙂", "{", "}", "<", "|", ">", "0", "user", "\t", "."]
        return "".join(self.rng.choice(words) + self.rng.choice(["", " "]) for _ in range(self.rng.randint(0, 9)))

    def call(self) -> ToolCall:
        self.counter += 1
        if self.rng.random() < 0.5:
            return _call(self.counter, "add", a=self.rng.randint(-9, 9), b=self.rng.randint(0, 10**12))
        return _call(self.counter, "search", query=self.text(), tags=[self.text()], exact=self.rng.random() < 0.5)

    def messages(self, turns: int) -> tuple[Message, ...]:
        rng = self.rng
        out = [_system(self.text())] if rng.random() < 0.5 else []
        for turn in range(turns):
            if turn == 0 or not self.open_calls:
                out += [_user(self.text()) for _ in range(rng.choice((1, 1, 1, 2)))]
            out += [_result(call, self.text()) for call in self.open_calls]
            self.open_calls = [self.call() for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
            reasoning = self.text().strip() if rng.random() < 0.7 else None
            content = self.text() if not self.open_calls or rng.random() < 0.5 else None
            out.append(_assistant(content, reasoning or None, *self.open_calls))
        return tuple(out)


def random_conversations(seed: int, count: int) -> Sequence[Conversation]:
    """Conversations of three to six turns; the same ones for the same seed.

    Args:
        seed: of the generator.
        count: how many.
    """
    return [
        Conversation(
            name=f"random {seed}/{index}",
            messages=_Source(random.Random(f"{seed}/{index}")).messages(3 + index % 4),
            tools=TOOLS,
        )
        for index in range(count)
    ]
