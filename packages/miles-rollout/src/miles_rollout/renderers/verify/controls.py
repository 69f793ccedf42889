"""Renderers broken on purpose, in the ways that chat templates are broken: the checks must notice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, ParsedMessage
from miles_rollout.renderers.forced import ForcedCall
from miles_rollout.renderers.protocol import Renderer, RenderOptions, Tools
from miles_rollout.renderers.vocabulary import Vocabulary


class _Broken:
    """Passes everything on; subclasses break one thing."""

    def __init__(self, inner: Renderer) -> None:
        self.inner = inner

    @property
    def family(self) -> str:
        return self.inner.family

    @property
    def options(self) -> RenderOptions:
        return self.inner.options

    @property
    def vocabulary(self) -> Vocabulary:
        return self.inner.vocabulary

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.inner.stop_token_ids

    def with_options(self, **changes: Any) -> Renderer:
        return type(self)(self.inner.with_options(**changes))

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        return self.inner.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def render_suffix(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools = (),
    ) -> list[int]:
        return self.inner.render_suffix(history_messages, history_ids, appended, tools)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_call(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools,
        name: str | None = None,
    ) -> ForcedCall:
        return self.inner.render_call(history_messages, history_ids, appended, tools, name)

    def parse(
        self, token_ids: Sequence[int], tools: Tools = (), *, calls: bool = True, opening: Sequence[int] = ()
    ) -> ParsedMessage:
        return self.inner.parse(token_ids, tools, calls=calls, opening=opening)

    def turn_syntax(self) -> CompletionSyntax:
        return self.inner.turn_syntax()


class _DropsReasoning(_Broken):
    """Keeps reasoning only behind the last question, as many published templates do."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        last = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        kept = [msgspec.structs.replace(m, reasoning_content=None) if i < last else m for i, m in enumerate(messages)]
        return self.inner.render(kept, tools, add_generation_prompt=add_generation_prompt)


class _MovesPrompt(_Broken):
    """Opens the assistant's turn at the front."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        without = self.inner.render(messages, tools, add_generation_prompt=False)
        if not add_generation_prompt:
            return without
        return self.inner.render(messages, tools)[len(without) :] + without


class _CountsMessages(_Broken):
    """Lets the head depend on the length of the conversation, as a date or a budget in it would."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        head = self.vocabulary.encode(f"{len(messages)} messages")
        return head + self.inner.render(messages, tools, add_generation_prompt=add_generation_prompt)


class _LosesGlue(_Broken):
    """Forgets the first token that belongs behind a sampled turn."""

    def render_suffix(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools = (),
    ) -> list[int]:
        return self.inner.render_suffix(history_messages, history_ids, appended, tools)[1:]


def _spelled(vocabulary: Vocabulary, ids: Sequence[int]) -> list[int]:
    """The same text character by character."""
    out: list[int] = []
    for token in ids:
        text = vocabulary.text_of(token)
        out += [token] if vocabulary.is_added(token) else [i for c in text for i in vocabulary.encode(c)]
    return out


class _SpellsDifferently(_Broken):
    """Encodes the appended part character by character: the same text in other tokens."""

    def render_suffix(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools = (),
    ) -> list[int]:
        return _spelled(self.vocabulary, self.inner.render_suffix(history_messages, history_ids, appended, tools))


class _SpellsCallsDifferently(_Broken):
    """Opens a forced call in other tokens than a rendered call has."""

    def render_call(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools,
        name: str | None = None,
    ) -> ForcedCall:
        forced = self.inner.render_call(history_messages, history_ids, appended, tools, name)
        opening = _spelled(self.vocabulary, forced.opening)
        return ForcedCall(ids=[*forced.ids[: len(forced.ids) - len(forced.opening)], *opening], opening=opening)


CONTROLS: dict[str, Callable[[Renderer], Renderer]] = {
    "drops earlier reasoning": _DropsReasoning,
    "moves the generation prompt": _MovesPrompt,
    "counts messages in the head": _CountsMessages,
    "loses glue behind a turn": _LosesGlue,
    "same text in other tokens": _SpellsDifferently,
    "opening of a call in other tokens": _SpellsCallsDifferently,
}
