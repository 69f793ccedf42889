"""The renderer of a conversation: whole once, then only what was appended, and never the sampled ids again.

A family is a `Dialect`: how it writes the head of a conversation, a message, and the opening of the assistant's turn.
`DialectRenderer` adds what all share. Because a dialect writes message by message and every turn is closed by a
control token, a longer conversation extends a shorter one by construction; what construction cannot promise (a seam
inside plain text) is checked, and refused when it fails.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from miles_contracts import InvalidFieldError, Message
from miles_rollout.parsers import CompletionSyntax, ParsedMessage, parse_completion
from miles_rollout.renderers.errors import RenderError
from miles_rollout.renderers.folder import ModelFolder
from miles_rollout.renderers.forced import ForcedCall, force_call
from miles_rollout.renderers.protocol import RenderOptions, Tools
from miles_rollout.renderers.seam import check_history, check_seam
from miles_rollout.renderers.writer import Writer


class BaseRenderer:
    """Tokenizer, options, stop tokens and views; families add how a conversation is written."""

    name: ClassVar[str]

    def __init__(self, folder: ModelFolder, options: RenderOptions, stop: Iterable[str]) -> None:
        self.folder = folder
        self.options = options
        self.vocabulary = folder.vocabulary
        names = dict.fromkeys([*stop, *folder.eos_tokens])
        self._stop_token_ids = tuple(self.vocabulary.id(t) for t in names if t in self.vocabulary.added)

    @property
    def family(self) -> str:
        """Name of the family."""
        return self.name

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that the tokenizer knows."""
        return self.vocabulary.size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an assistant turn, the family's own first."""
        return self._stop_token_ids

    def with_options(self, **changes: Any) -> Self:
        """The same renderer with other options; cheap, shares the tokenizer.

        Raises:
            InvalidFieldError: an option that does not exist.
        """
        unknown = changes.keys() - RenderOptions.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(sorted(RenderOptions.__dataclass_fields__))
            raise InvalidFieldError("render options", sorted(unknown)[0], f"must be one of {known}")
        other = copy.copy(self)
        other.options = replace(self.options, **changes)
        other.check_options()
        return other

    def check_options(self) -> None:
        """Refuses options that the family cannot follow.

        Raises:
            InvalidFieldError: a way of thinking or an effort that the models of the family do not have.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; without the tokens that the tokenizer calls special and those that end a turn.

        Raises:
            InvalidFieldError: an id is outside the vocabulary.
        """
        if not skip_special_tokens:
            return self.vocabulary.decode(token_ids)
        added = self.vocabulary.added
        return self.vocabulary.decode(
            token_ids, skip=[*(added[t] for t in self.vocabulary.special), *self._stop_token_ids]
        )

    def parse(
        self, token_ids: Sequence[int], tools: Tools = (), *, calls: bool = True, opening: Sequence[int] = ()
    ) -> ParsedMessage:
        """The client's view of one sampled turn; the ids are only read.

        Args:
            token_ids: what was sampled after the generation prompt, stop token included if there was one.
            tools: the tools of the request, whose schemas tell text arguments from numbers.
            calls: false leaves tool calls in the content, as they were written.
            opening: the forced beginning of the turn's call (`ForcedCall.opening`), which was not sampled.
        """
        end = len(token_ids)
        if end and token_ids[-1] in self._stop_token_ids:
            end -= 1
        syntax = self.turn_syntax() if calls else self.turn_syntax().without_calls()
        if opening:
            syntax = syntax.without_reasoning()
        return parse_completion(self.vocabulary.decode([*opening, *token_ids[:end]]), syntax, tools)

    def turn_syntax(self) -> CompletionSyntax:
        """How a sampled turn is to be read under the current options."""
        raise NotImplementedError


class DialectRenderer(BaseRenderer):
    """A family that writes conversations message by message.

    Subclasses state their tokens and write messages; they never look at messages other than the one they write, its
    neighbours in the same request and the assistant turn that a tool result answers.

    Attributes:
        models: the models that write so, for people.
        checked: the independent implementations it was compared with, for people; "" when there was none.
        deviation: where it differs from the published template, and must, to be append-only.
        thinking_choices: what `RenderOptions.thinking` may be.
        efforts: what `RenderOptions.reasoning_effort` may be.
        end: the control token that closes an assistant turn, or "" when the next turn's opening does.
        glue: text between `end` and whatever follows.
        stop: further control tokens at which the model stops.
        roles: roles that may appear in messages.
        structural: control tokens that message text may not turn into, besides the tokenizer's special ones.
        required: added tokens without which the tokenizer cannot be of this family.
    """

    models: ClassVar[str] = ""
    checked: ClassVar[str] = ""
    deviation: ClassVar[str] = ""
    thinking_choices: ClassVar[tuple[bool, ...]] = (True, False)
    efforts: ClassVar[tuple[str, ...]] = ()
    end: ClassVar[str] = ""
    glue: ClassVar[str] = ""
    stop: ClassVar[tuple[str, ...]] = ()
    roles: ClassVar[frozenset[str]] = frozenset({"system", "developer", "user", "assistant", "tool"})
    structural: ClassVar[frozenset[str]] = frozenset()
    required: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: ModelFolder, options: RenderOptions) -> None:
        """Binds the family to a tokenizer.

        Raises:
            InvalidFieldError: the tokenizer lacks a token of the family, or the options do not fit it.
        """
        super().__init__(folder, options, (self.end, *self.stop) if self.end else self.stop)
        for token in (*self.required, *([self.end] if self.end else [])):
            if token not in self.vocabulary.added:
                raise InvalidFieldError(
                    "family", self.name, f"needs the token {token!r}, which this tokenizer lacks; choose another family"
                )
        self._structural = self.structural | self.vocabulary.special
        self.check_options()

    def check_options(self) -> None:
        """See `BaseRenderer.check_options`."""
        thinking, effort = self.options.thinking, self.options.reasoning_effort
        if thinking is not None and thinking not in self.thinking_choices:
            always = "always" if self.thinking_choices == (True,) else "never"
            raise InvalidFieldError(
                "thinking", thinking, f"models of the family {self.name} {always} think; leave it out"
            )
        known = self.known_efforts()
        if effort is not None and effort not in known:
            must = f"must be one of {', '.join(known)}" if known else "cannot be chosen; leave it out"
            raise InvalidFieldError("reasoning_effort", effort, f"{must} (family {self.name})")

    def known_efforts(self) -> tuple[str, ...]:
        """The efforts of this model."""
        return self.efforts

    # -- what a family writes ------------------------------------------------------------------------------------

    def write_head(self, out: Writer, messages: Sequence[Message], tools: Tools) -> int:
        """Writes what precedes the first turn; returns how many leading messages that has used up."""
        return 0

    def write_message(self, out: Writer, messages: Sequence[Message], index: int) -> None:
        """Writes one message with its closing token; neighbours in `messages` are for grouping tool results."""
        raise NotImplementedError

    def write_generation_prompt(self, out: Writer, previous: Message | None) -> None:
        """Opens the assistant's turn after `previous` (None at the start of a conversation)."""
        raise NotImplementedError

    def write_close(self, out: Writer, turn: Message, following: Message | None) -> None:
        """Completes a sampled assistant turn: whatever the family puts behind it that was not sampled.

        Args:
            out: takes the rest of the turn; it leaves out the end token when the history ends with it.
            turn: the sampled turn as a message.
            following: the message that comes next, or None for another assistant turn.
        """
        if self.end:
            out.control(self.end)
        out.text(self.glue)

    # -- what all families share -----------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole conversation.

        Args:
            messages: the conversation, first message first.
            tools: OpenAI tool objects.
            add_generation_prompt: also open the next assistant turn.

        Raises:
            InvalidFieldError: a role or field that no family has a form for.
            RenderError: the family has no form for this conversation.
        """
        out = self._written(messages, tools)
        if add_generation_prompt:
            self.write_generation_prompt(out, messages[-1] if messages else None)
        return out.ids()

    def _written(self, messages: Sequence[Message], tools: Tools) -> Writer:
        """The writer of a whole conversation up to its last message."""
        self._check(messages)
        out = Writer(self.vocabulary, self._structural, after=None)
        for index in range(self.write_head(out, messages, tools), len(messages)):
            self.write_message(out, messages, index)
        return out

    def render_suffix(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools = (),
    ) -> list[int]:
        """Ids to put behind `history_ids`: the rest of the sampled turn, `appended`, the next generation prompt.

        Costs time for `appended` only, however long the history is.

        Args:
            history_messages: messages that `history_ids` stands for; the last one is an assistant turn.
            history_ids: the ids as rendered and sampled, int sequence of any length; only its end is read.
            appended: the new messages; empty asks for another assistant turn.
            tools: as in `render`; they are part of the head and not written again.

        Raises:
            InvalidFieldError: the history does not end with an assistant turn, or a bad role or field.
            RenderError: the family has no form for this conversation.
            RenderRefusedError: the ids would not equal those of the whole rendered at once.
        """
        if not history_messages and not len(history_ids):
            return self.render(appended, tools)
        out, context = self._continued(history_messages, history_ids, appended)
        self.write_generation_prompt(out, context[-1])
        ids = out.ids()
        check_seam(self.vocabulary, history_ids, ids, out.leading, message_index=len(history_messages))
        return ids

    def render_call(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools,
        name: str | None = None,
    ) -> ForcedCall:
        """As `render_suffix`, but the assistant's turn is opened with a call instead of being left to the policy.

        The turn is opened as one without reasoning and without text before the call is written; where the generation
        prompt opens a reasoning block, that block is closed or left out as in such a turn.

        Args:
            history_messages, history_ids, appended: as in `render_suffix`; no history renders the whole.
            tools: those that may be called.
            name: the one that must be called, None for any of them.

        Raises:
            CallOpeningError: the family has no exact opening for this choice.
            InvalidFieldError, RenderError, RenderRefusedError: as `render_suffix`.
        """
        if not history_messages and not len(history_ids):
            out, context = self._written(appended, tools), list(appended)
        else:
            out, context = self._continued(history_messages, history_ids, appended)
        leading = ""

        def with_turn(turn: Message) -> list[int]:
            nonlocal leading
            fork = out.fork()
            self.write_message(fork, [*context, turn], len(context))
            ids = fork.ids()
            leading = fork.leading
            return ids

        forced = force_call(with_turn, self.vocabulary, tools, name)
        if len(history_ids):
            check_seam(self.vocabulary, history_ids, forced.ids, leading, message_index=len(history_messages))
        return forced

    def _continued(
        self, history_messages: Sequence[Message], history_ids: Sequence[int], appended: Sequence[Message]
    ) -> tuple[Writer, list[Message]]:
        """The writer of what follows a history, up to the last appended message; and the messages it has seen."""
        check_history(history_messages, history_ids)
        self._check(appended, offset=len(history_messages))
        context = [history_messages[-1], *appended]
        out = Writer(self.vocabulary, self._structural, after=history_ids[-1])
        if not self._is_closed(history_ids):
            self.write_close(out, context[0], appended[0] if appended else None)
        for index in range(1, len(context)):
            self.write_message(out, context, index)
        return out, context

    def _is_closed(self, ids: Sequence[int]) -> bool:
        """True when a history has the text behind its last end token, because it was rendered and not sampled."""
        if not self.glue:
            return False
        tail = [self.vocabulary.id(self.end), *self.vocabulary.encode(self.glue)]
        return list(ids[max(len(ids) - len(tail), 0) :]) == tail

    def _check(self, messages: Sequence[Message], offset: int = 0) -> None:
        for index, message in enumerate(messages):
            if message.role not in self.roles:
                raise InvalidFieldError(
                    f"messages[{offset + index}].role", message.role, f"must be one of {', '.join(sorted(self.roles))}"
                )


def require_text(message: Message, index: int) -> str:
    """Content of a message that must have some form of it.

    Raises:
        RenderError: the message has no content at all.
    """
    if message.content is None:
        raise RenderError(f"messages[{index}].content: a {message.role} message needs text; send an empty string")
    return message.content
