"""What a renderer is to those who use one: rendering, suffixes, openings of calls, and the views of sampled turns."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_contracts import Message
from miles_rollout.parsers import CompletionSyntax, ParsedMessage
from miles_rollout.renderers.forced import ForcedCall
from miles_rollout.renderers.vocabulary import Vocabulary

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What a request may choose about the rendering; fixed within one conversation.

    Attributes:
        thinking: whether the assistant reasons before it answers; None leaves it to the family.
        reasoning_effort: a level the family knows ("low", "medium", "high", ...); None leaves it to the family.
        today: the date that some templates print; fixed when a renderer is made, because a date that changes at
            midnight would change the head of a running conversation.
        template_variables: further variables for a Jinja template (only the default family reads them).
    """

    thinking: bool | None = None
    reasoning_effort: str | None = None
    today: datetime.date = field(default_factory=datetime.date.today)
    template_variables: Mapping[str, Any] = field(default_factory=dict)


class Renderer(Protocol):
    """What the session server, the rollout and data preparation use of a family (see `DialectRenderer`)."""

    @property
    def family(self) -> str: ...
    @property
    def options(self) -> RenderOptions: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def with_options(self, **changes: Any) -> Renderer:
        """The same renderer with other `RenderOptions`; cheap, shares the tokenizer."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole conversation, by default with the opening of the next assistant turn."""
        ...

    def render_suffix(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools = (),
    ) -> list[int]:
        """Ids to put behind `history_ids` so that the policy can go on after `appended`."""
        ...

    def render_call(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools,
        name: str | None = None,
    ) -> ForcedCall:
        """As `render_suffix`, but the assistant's turn is opened with a call: of one tool, or of any."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        ...

    def parse(
        self, token_ids: Sequence[int], tools: Tools = (), *, calls: bool = True, opening: Sequence[int] = ()
    ) -> ParsedMessage:
        """The view of a sampled turn that a client gets: content, reasoning, tool calls."""
        ...

    def turn_syntax(self) -> CompletionSyntax:
        """How a sampled turn is to be read under the current options."""
        ...
