"""Collects the pieces of a rendering and turns them into ids, each piece of plain text encoded once, in context."""

from __future__ import annotations

import copy

from miles_rollout.renderers.vocabulary import Vocabulary


class Writer:
    """An append-only sequence of control tokens and text.

    Neighbouring texts are joined before they are encoded, so that merges between a template's own text and the
    message inside it are those of the whole; control tokens cut the text, as they do in the tokenizer.

    Attributes:
        leading: the plain text before the first control token (complete once `ids` was called).
    """

    def __init__(self, vocabulary: Vocabulary, structural: frozenset[str], *, after: int | None) -> None:
        """Starts empty.

        Args:
            vocabulary: the tokenizer.
            structural: added tokens that shape the conversation; message text never turns into one of them.
            after: the last id of the context that this continues, None at the very start. In families whose stop
                token is also the opening of the next turn it is not written a second time.
        """
        self._vocabulary = vocabulary
        self._in_content = frozenset(vocabulary.added) - structural
        self._after = after
        self._at_start = after is None
        self._ids: list[int] = []
        self._pending: list[str] = []
        self._encoded: dict[str, list[int]] | None = None  # shared by forks, whose texts begin alike
        self.leading = ""

    def control(self, token: str) -> None:
        """Appends one added token by name, unless it is the first thing and the context already ends with it."""
        token_id = self._vocabulary.id(token)
        if token_id == self._after and not self._ids and not self._pending:
            self._after = None
        else:
            self.token(token_id)

    def text(self, text: str) -> None:
        """Appends the template's own text; added tokens in it count as such."""
        self._extend(text, None)

    def content(self, text: str) -> None:
        """Appends text that somebody else wrote; structural tokens in it stay plain text."""
        self._extend(text, self._in_content)

    def token(self, token_id: int) -> None:
        """Appends one id."""
        self._flush()
        self._ids.append(token_id)

    def plain(self, text: str) -> None:
        """Appends text in which no added token is looked for."""
        if text:
            self._pending.append(text)

    def fork(self) -> Writer:
        """A copy that goes on by itself; text that several copies flush is encoded once."""
        self._encoded = {} if self._encoded is None else self._encoded
        other = copy.copy(self)
        other._ids = list(self._ids)
        other._pending = list(self._pending)
        return other

    def ids(self) -> list[int]:
        """Everything so far; the writer may go on afterwards, with a cut at this place."""
        self._flush()
        return self._ids

    def _extend(self, text: str, recognised: frozenset[str] | None) -> None:
        for piece in self._vocabulary.split(text, recognised):
            if isinstance(piece, str):
                self.plain(piece)
            else:
                self.token(piece)

    def _flush(self) -> None:
        if self._pending:
            text = "".join(self._pending)
            self._pending.clear()
            if not self._ids:
                self.leading = text
            self._ids += self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._at_start and not self._ids:
            return self._vocabulary.encode(text, at_start=True)
        if self._encoded is None:
            return self._vocabulary.encode(text)
        if text not in self._encoded:
            self._encoded[text] = self._vocabulary.encode(text)
        return self._encoded[text]
