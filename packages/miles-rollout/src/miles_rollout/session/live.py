"""The view of a turn while it is sampled: what may already be shown, and what the finished turn then has to say."""

from __future__ import annotations

from collections.abc import Callable

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


class LiveView:
    """Turns growing ids into deltas whose content, put together, is the beginning of the finished content.

    Args:
        renderer: reads the turn.
        stop: stop strings of the request, which the client never sees.
        emit: takes the deltas.
    """

    def __init__(self, renderer: Renderer, stop: tuple[str, ...], emit: Callable[[Delta], None]) -> None:
        self._vocabulary = renderer.vocabulary
        self._syntax = renderer.turn_syntax()
        self._ends = frozenset(renderer.stop_token_ids)
        self._stop = stop
        self._emit = emit
        self.shown = Progress()

    def advance(self, output_ids: NDArray[np.int32]) -> bool:
        """Take all ids sampled so far, int32 [N]; says whether the client has seen any of the turn."""
        try:
            known = self._syntax.so_far(self._text(output_ids.tolist(), whole=False))
        except InvalidFieldError:  # an id that does not exist: the check of the finished answer will say so
            return self.shown != Progress()
        content = text_before(known.content, self._stop)
        fresh = self.shown == Progress()
        reasoning = known.reasoning_content if fresh else self.shown.reasoning_content
        # What contradicts the text that is out, or takes some of it back, is left to `settle`.
        if not content.startswith(self.shown.content):
            content = self.shown.content
        if (now := Progress(content=content, reasoning_content=reasoning)) != self.shown:
            piece = content[len(self.shown.content) :]
            self._emit(Delta(content=piece, reasoning_content=reasoning if fresh else None))
            self.shown = now
        return self.shown != Progress()

    def settle(self, parsed: ParsedMessage, output_ids: list[int]) -> ParsedMessage:
        """The finished turn such that it begins with what was shown.

        Only a turn that closes a reasoning it never opened can differ: it has been shown as content, and stays it.
        """
        shown = self.shown
        agrees = shown.reasoning_content is None or shown.reasoning_content == parsed.reasoning_content
        if agrees and parsed.content.startswith(shown.content):
            return parsed
        return ParsedMessage(content=self._text(output_ids, whole=True))

    def _text(self, ids: list[int], *, whole: bool) -> str:
        end = len(ids)
        if end and ids[-1] in self._ends:
            end -= 1
        if whole:
            return self._vocabulary.decode(ids[:end])
        while end and self._vocabulary.is_byte(ids[end - 1]):
            end -= 1
        return self._vocabulary.decode(ids[:end]).rstrip(_UNFINISHED)
