"""Any Hugging Face chat template, as far as it is append-only: checked at every turn, refused when it is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jinja2

from miles_contracts import InvalidFieldError, Message
from miles_rollout.parsers import CompletionSyntax, JsonCalls, TaggedSyntax, XmlCalls
from miles_rollout.renderers.base import BaseRenderer
from miles_rollout.renderers.environment import compile_template
from miles_rollout.renderers.errors import CallOpeningError, RenderError, RenderRefusedError
from miles_rollout.renderers.folder import ModelFolder
from miles_rollout.renderers.forced import ForcedCall, force_call
from miles_rollout.renderers.jsontext import parse_arguments
from miles_rollout.renderers.protocol import RenderOptions, Tools
from miles_rollout.renderers.seam import check_history, check_seam
from miles_rollout.renderers.writer import Writer

_MARKS = ("\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3")  # noncharacters: never assigned, never in exchanged text
_REMEDY = "this chat template rewrites history; choose a family with its own renderer, or do not continue the turn"


class TemplateRenderer(BaseRenderer):
    """The chat template in the model folder, run in Hugging Face's sandbox.

    A suffix costs one rendering of the history as *text* (that is what proves the template append-only here), but only
    the new part is tokenised. Families with their own renderer do not pay even that.
    """

    name: ClassVar[str] = "default"

    def __init__(self, folder: ModelFolder, options: RenderOptions) -> None:
        """Compiles the template.

        Raises:
            InvalidFieldError: the folder has no chat template, it is not Jinja, or no stop token is known.
        """
        super().__init__(folder, options, ())
        if folder.chat_template is None:
            raise InvalidFieldError(
                "chat_template", str(folder.path), "the folder has none; name a family, or add chat_template.jinja"
            )
        if not self._stop_token_ids:
            raise InvalidFieldError(
                "eos_token", str(folder.path), "no stop token is known; set eos_token in tokenizer_config.json"
            )
        self._template = compile_template(folder.chat_template, options.today)
        special = sorted(self.vocabulary.special, key=lambda t: (-len(t), t))
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._syntax = _guess_syntax(folder.chat_template)

    def turn_syntax(self) -> CompletionSyntax:
        """Reasoning counts as open when the generation prompt has opened it."""
        if self._syntax.opening is None:
            return self._syntax
        probe = [Message(role="user", content="x")]
        text, _ = self._text(probe, (), None, add_generation_prompt=True)
        return replace(self._syntax, begins_inside=text.rstrip().endswith(self._syntax.opening))

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole conversation.

        Raises:
            RenderError: the template refuses or fails on the conversation.
        """
        text, mark = self._text(messages, tools, None, add_generation_prompt=add_generation_prompt)
        return self._encode(text, mark, after=None).ids()

    def render_suffix(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools = (),
    ) -> list[int]:
        """Ids to put behind `history_ids`; see `DialectRenderer.render_suffix`.

        Raises:
            InvalidFieldError: the history does not end with an assistant turn.
            RenderError: the template refuses the conversation.
            RenderRefusedError: the template does not extend what it made of the history.
        """
        if not history_messages and not len(history_ids):
            return self.render(appended, tools)
        everything = [*history_messages, *appended]
        mark = self._mark(everything)
        before = self._before(history_messages, history_ids, tools, mark)
        out = self._behind(before, history_messages, history_ids, everything, tools, mark, add_generation_prompt=True)
        return self._checked(out, history_messages, history_ids)

    def render_call(
        self,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        appended: Sequence[Message],
        tools: Tools,
        name: str | None = None,
    ) -> ForcedCall:
        """As `render_suffix`, with the opening of a call; see `DialectRenderer.render_call`.

        Every try costs a rendering of the history as text.

        Raises:
            CallOpeningError: it is not known how this template writes calls, or they have no exact opening.
            InvalidFieldError, RenderError, RenderRefusedError: as `render_suffix`.
        """
        if self._syntax.calls is None:
            raise CallOpeningError("how its template writes calls is not known")
        everything = [*history_messages, *appended]
        mark = self._mark(everything)
        before = self._before(history_messages, history_ids, tools, mark) if len(history_ids) else ""

        def with_turn(turn: Message) -> list[int]:
            turns = [*everything, turn]
            if not len(history_ids):
                return self.render(turns, tools, add_generation_prompt=False)
            out = self._behind(before, history_messages, history_ids, turns, tools, mark, add_generation_prompt=False)
            return self._checked(out, history_messages, history_ids)

        return force_call(with_turn, self.vocabulary, tools, name)

    def _before(self, history_messages: Sequence[Message], history_ids: Sequence[int], tools: Tools, mark: str) -> str:
        """The template's text of a history."""
        check_history(history_messages, history_ids)
        return self._text(history_messages, tools, mark, add_generation_prompt=False)[0]

    def _behind(
        self,
        before: str,
        history_messages: Sequence[Message],
        history_ids: Sequence[int],
        everything: Sequence[Message],
        tools: Tools,
        mark: str,
        *,
        add_generation_prompt: bool,
    ) -> Writer:
        """What the text of everything has behind `before`, the text of the history."""
        after, _ = self._text(everything, tools, mark, add_generation_prompt=add_generation_prompt)
        if not after.startswith(before):
            self._refuse(history_messages, tools, mark, before, after)
        rest = self._rest_of_turn(before, history_ids[-1], len(history_messages) - 1) + after[len(before) :]
        return self._encode(rest, mark, after=history_ids[-1])

    def _checked(self, out: Writer, history_messages: Sequence[Message], history_ids: Sequence[int]) -> list[int]:
        ids = out.ids()
        check_seam(self.vocabulary, history_ids, ids, out.leading, message_index=len(history_messages))
        return ids

    def _text(
        self, messages: Sequence[Message], tools: Tools, mark: str | None, *, add_generation_prompt: bool
    ) -> tuple[str, str]:
        """The template's text, and the mark that keeps special tokens inside messages apart."""
        mark = self._mark(messages) if mark is None else mark
        variables: dict[str, Any] = dict(self.folder.named_tokens)
        if self.options.thinking is not None:
            variables["enable_thinking"] = self.options.thinking
        if self.options.reasoning_effort is not None:
            variables["reasoning_effort"] = self.options.reasoning_effort
        # Asked to keep earlier reasoning under every name that templates have for it; those that know none ignore it.
        variables |= {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False}
        variables |= self.options.template_variables
        try:
            text = self._template.render(
                messages=[self._message(m, mark) for m in messages],
                tools=[dict(t) for t in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, RenderError):
                raise
            raise RenderError(f"the chat template fails on this conversation: {error}") from error
        return text, mark

    def _message(self, message: Message, mark: str) -> dict[str, Any]:
        """A message as templates expect it: text content, arguments as an object where they are one."""
        out = message.to_dict()
        out["content"] = message.content or ""
        if message.role != "assistant":
            out["content"] = self._escape(out["content"], mark)
        for call in out.get("tool_calls", ()):
            arguments = parse_arguments(call["function"]["arguments"])
            if arguments is not None:
                call["function"]["arguments"] = arguments
        return out

    def _mark(self, messages: Sequence[Message]) -> str:
        for mark in _MARKS:
            if not any(mark in (m.content or "") for m in messages):
                return mark
        raise InvalidFieldError("messages", "U+FDD0 to U+FDD3", "must not contain all four of these noncharacters")

    def _escape(self, content: str, mark: str) -> str:
        """Splits special tokens in somebody's text with a mark, so that they are not found in the template's output."""
        if self._special is None:
            return content
        return self._special.sub(lambda m: m.group()[0] + mark + m.group()[1:], content)

    def _encode(self, text: str, mark: str, *, after: int | None) -> Writer:
        out = Writer(self.vocabulary, self.vocabulary.special, after=after)
        for piece in self.vocabulary.split(text):
            if isinstance(piece, int):
                out.token(piece)
            else:
                out.plain(piece.replace(mark, ""))
        return out

    def _rest_of_turn(self, before: str, last_id: int, message_index: int) -> str:
        """What the template puts behind the sampled part of the last assistant turn.

        `before` ends with that turn as the template closes it; the part after the sampled stop token is missing in
        the ids, and so is the stop token itself when the turn was stopped in another way.
        """
        for stop in self._stop_token_ids:
            token = self.vocabulary.text_of(stop)
            at = before.rfind(token)
            if at >= 0 and not before[at + len(token) :].strip():
                return before[at + len(token) :] if last_id == stop else before[at:]
        raise RenderRefusedError(
            "the template does not close an assistant turn with a stop token",
            message_index=message_index,
            position=0,
            token=before[-20:],
            remedy=_REMEDY,
        )

    def _refuse(self, history: Sequence[Message], tools: Tools, mark: str, before: str, after: str) -> None:
        """Names the first token and message at which the longer rendering leaves the shorter one."""
        shorter = min(len(before), len(after))
        at = next((i for i in range(shorter) if before[i] != after[i]), shorter)
        index = 0
        for index in range(len(history)):
            try:
                text, _ = self._text(history[: index + 1], tools, mark, add_generation_prompt=False)
            except RenderError:  # some templates refuse conversations without a user turn
                continue
            if len(text) > at:
                break
        ids = self._encode(after, mark, after=None).ids()
        position = len(self._encode(after[:at], mark, after=None).ids())
        token = self.vocabulary.text_of(ids[position]) if position < len(ids) else ""
        raise RenderRefusedError(
            "the chat template renders the history differently once messages follow it",
            message_index=index,
            position=position,
            token=token,
            remedy=_REMEDY,
        )


def _guess_syntax(template: str) -> TaggedSyntax:
    """The way of writing turns that a template shows: tags of reasoning and the form of its calls."""
    calls = None
    if "<tool_call>" in template:
        calls = XmlCalls() if "<function=" in template else JsonCalls()
    return TaggedSyntax(opening="<think>" if "<think>" in template else None, calls=calls)
