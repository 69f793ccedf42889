"""The view of a turn while it is sampled: what may already be shown, and what the finished turn then has to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError
from miles_rollout.parsers import ParsedMessage, Progress, text_before
from miles_rollout.renderers import Renderer

_UNFINISHED = "\ufffd"
"""What the bytes of an unfinished character decode to."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a turn that a client may have now.

    Attributes:
        content: the next piece of content, may be empty.
        reasoning_content: the whole reasoning; at most one delta of a turn has it, and it is the first one.
    """

    content: str = ""
    reasoning_content: str | None = None


def opened_chars(content: str, opened: str) -> int:
    """Characters of content that a forced call was opened with, `opened` with or without white space in front: stop
    strings are looked for in what is sampled only, as the engine does."""
    return next((len(text) for text in (opened, opened.lstrip()) if text and content.startswith(text)), 0)


class _Live:
    """What is out already of a turn whose ids grow, and where the next piece goes."""

    def __init__(self, renderer: Renderer, stop: tuple[str, ...], emit: Callable[[Delta], None]) -> None:
        self._renderer = renderer
        self._vocabulary = renderer.vocabulary
        self._stop = stop
        self._emit = emit
        self._opened = ""
        self.shown = Progress()

    def advance(self, output_ids: NDArray[np.int32]) -> bool:
        """Take all ids sampled so far, int32 [N]; says whether the client has seen any of the turn."""
        try:
            known = self._known(self._whole_characters(output_ids.tolist()))
        except InvalidFieldError:  # an id that does not exist: the check of the finished answer will say so
            return self.shown != Progress()
        start = opened_chars(known.content, self._opened)
        content = known.content[:start] + text_before(known.content[start:], self._stop)
        fresh = self.shown == Progress()
        reasoning = known.reasoning_content if fresh else self.shown.reasoning_content
        # What contradicts the text that is out, or takes some of it back, is left to the finished turn.
        if not content.startswith(self.shown.content):
            content = self.shown.content
        if (now := Progress(content=content, reasoning_content=reasoning)) != self.shown:
            piece = content[len(self.shown.content) :]
            self._emit(Delta(content=piece, reasoning_content=reasoning if fresh else None))
            self.shown = now
        return self.shown != Progress()

    def _known(self, ids: list[int]) -> Progress:
        raise NotImplementedError

    def _whole_characters(self, ids: list[int]) -> list[int]:
        """Without ids at the end that are bytes of a character which is not finished."""
        end = len(ids)
        while end and self._vocabulary.is_byte(ids[end - 1]):
            end -= 1
        return ids[:end]


class LiveText(_Live):
    """Turns the growing ids of a text completion into pieces of its text.

    Args:
        renderer: decodes.
        stop: stop strings of the request, which the client never sees.
        emit: takes the pieces.
    """

    def _known(self, ids: list[int]) -> Progress:
        return Progress(content=self._renderer.decode(ids).rstrip(_UNFINISHED))


class LiveTurn(_Live):
    """Turns growing ids into deltas whose content, put together, is the beginning of the finished content.

    Args:
        renderer: reads the turn.
        stop: stop strings of the request, which the client never sees.
        emit: takes the deltas.
        calls: false for a client that gets calls as content.
        opening: the forced beginning of the turn's call, which is not among the ids.
    """

    def __init__(
        self,
        renderer: Renderer,
        stop: tuple[str, ...],
        emit: Callable[[Delta], None],
        *,
        calls: bool = True,
        opening: Sequence[int] = (),
    ) -> None:
        super().__init__(renderer, stop, emit)
        self._syntax = renderer.turn_syntax() if calls else renderer.turn_syntax().without_calls()
        if opening:
            self._syntax = self._syntax.without_reasoning()
        self._opening = list(opening)
        self._opened = self._vocabulary.decode(self._opening)
        self._ends = frozenset(renderer.stop_token_ids)

    def settle(self, parsed: ParsedMessage, output_ids: list[int]) -> ParsedMessage:
        """The finished turn such that it begins with what was shown.

        Only a turn that closes a reasoning it never opened can differ: it has been shown as content, and stays it.
        """
        shown = self.shown
        agrees = shown.reasoning_content is None or shown.reasoning_content == parsed.reasoning_content
        if agrees and parsed.content.startswith(shown.content):
            return parsed
        return ParsedMessage(content=self._written(output_ids))

    def _known(self, ids: list[int]) -> Progress:
        return self._syntax.so_far(self._written(ids).rstrip(_UNFINISHED))

    def _written(self, ids: list[int]) -> str:
        return self._vocabulary.decode([*self._opening, *(ids[:-1] if ids and ids[-1] in self._ends else ids)])
