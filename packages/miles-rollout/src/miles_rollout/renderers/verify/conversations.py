"""The conversations a renderer is tried on: a fixed suite of what harnesses do, and random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
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


def standard_conversations() -> tuple[Conversation, ...]:
    """The fixed suite."""
    one, two, three = _call(0, "add", a=1, b=2), _call(1, "search", query="größe", limit=2.5), _call(2, "add", a=3, b=4)
    odd = _call(3, "search", query='"quoted" {x}\n</tool_call>', tags=["a", "b"], exact=True)
    c = Conversation
    plain = (
        _user("One?"),
        _assistant("First."),
        _user("Two?"),
        _assistant("Second."),
        _user("Three?"),
        _assistant("Third."),
    )
    return (
        c(name="questions and answers", messages=plain, required=True),
        c(name="system message first", messages=(_system("Be brief."), *plain)),
        c(
            name="reasoning in every turn",
            messages=tuple(
                m if m.role == "user" else _assistant(m.content, f"Because {m.content}\n\nSo be it.") for m in plain
            ),
            required=True,
        ),
        c(
            name="one call a turn",
            messages=(
                *(_system("Use tools."), _user("Add, then search.")),
                *(_assistant("", "Add first.", one), _result(one, "3")),
                *(_assistant("Now the notes.", "Then search.", two), _result(two, "nothing\nfound")),
                *(_assistant("Three; no notes.", "Done."), _user("Thanks."), _assistant("Welcome.")),
            ),
            tools=TOOLS,
        ),
        c(
            name="several calls in one turn",
            messages=(
                *(_user("All at once."), _assistant(None, "Three calls.", one, two, three)),
                *(_result(one, "3"), _result(two, "none"), _result(three, "7")),
                *(_assistant("", "Once more.", three), _result(three, "7"), _assistant("7.", "Good.")),
            ),
            tools=TOOLS,
        ),
        c(
            name="tool errors and odd arguments",
            messages=(
                *(_user("Go."), _assistant("", "Try.", odd), _result(odd, "Error: <tool_call> is not allowed\n")),
                *(
                    _assistant("", "Again.", one),
                    _result(one, ""),
                    _assistant("Failed."),
                    _user("Why?"),
                    _assistant("Odd."),
                ),
            ),
            tools=TOOLS,
        ),
        c(
            name="system message in the middle",
            messages=(*plain[:2], _system("Now in French."), *plain[2:4], _system("Stop."), *plain[4:]),
        ),
        c(
            name="user after user",
            messages=(*plain[:2], _user("Well?"), *plain[2:], _user("So?"), _user("And?"), _assistant("No.")),
        ),
        c(name="question after a call", messages=(*plain[:1], _assistant("", "Call.", one), *plain[2:]), tools=TOOLS),
        c(
            name="question after results",
            messages=(_user("Go."), _assistant("", "Call.", one), _result(one, "3"), *plain[2:]),
            tools=TOOLS,
        ),
        c(name="assistant after assistant", messages=(*plain[:2], _assistant("And more."), *plain[2:])),
        c(
            name="empty content",
            messages=(_user(""), _assistant(""), _user("?"), _assistant("", "Nothing."), _user(""), _assistant("x")),
        ),
        c(
            name="white space at the edges",
            messages=(
                *(
                    _user("\n\n  hi \n"),
                    _assistant("  indented\n\n"),
                    _user("\t"),
                    _assistant("\n\nlate\n", "\n  deep \n"),
                ),
                *(_user(" \n"), _assistant("end ")),
            ),
        ),
        c(
            name="unicode",
            messages=(
                *(
                    _system("Größe ≠ 大小"),
                    _user("naïve cafe\u0301 👩‍👩‍👧 \u202eabc\u202c"),
                    _assistant("日本語\u3000です", "思考"),
                ),
                *(_user("\ud7ff\U0010ffff"), _assistant("ﬁ ≠ fi"), _user("a\u0000b"), _assistant("🫠")),
            ),
        ),
    )


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
