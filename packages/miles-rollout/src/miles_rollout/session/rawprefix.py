"""Recognise by its bytes the part of a request that was matched before, so that only the new part is decoded.

A client sends its whole history every turn. The JSON text of the `messages` array, without its closing bracket,
is a prefix of the next request's text when the client repeats itself, and a JSON text with that prefix starts
with exactly those messages. Comparing it costs one `memcmp`, and no byte of a history is copied; decoding and
matching are left for what follows.
"""

from __future__ import annotations

import msgspec
import numpy as np

from miles_rollout.session.nodes import Node

_BLANK = b" \t\r\n"


class RawText:
    """A piece of a request's body, where it lies: `body[begin:end]`."""

    __slots__ = ("begin", "body", "end")

    def __init__(self, body: bytes, begin: int = 0, end: int | None = None) -> None:
        self.body = body
        self.begin = begin
        self.end = len(body) if end is None else end

    @classmethod
    def of(cls, body: bytes, part: msgspec.Raw) -> RawText:
        """A part that was decoded from `body` and still lies in it; a copy of it otherwise."""
        view = memoryview(part)
        if not len(view):
            return cls(b"")
        begin = int(np.frombuffer(view, np.uint8).ctypes.data) - int(np.frombuffer(body, np.uint8).ctypes.data)
        if 0 <= begin <= len(body) - len(view):
            return cls(body, begin, begin + len(view))
        return cls(bytes(view))

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return memoryview(self.body)[self.begin : self.end]

    def startswith(self, other: RawText) -> bool:
        """True when it begins with the bytes of `other`."""
        return len(other) <= len(self) and self.body.startswith(other.view, self.begin)


class RawPrefixes:
    """The last few requests of a session, by the text of their messages.

    Args:
        capacity: how many conversations are remembered (one per branch that is being continued).
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        # A list, not a dictionary: hashing a whole conversation would cost more than comparing it with a few.
        self._entries: list[tuple[RawText, Node, int]] = []

    def find(self, raw: RawText) -> tuple[Node, int, bytes] | None:
        """The longest remembered request that this one continues.

        Args:
            raw: JSON text of the request's `messages`, already known to be valid JSON.

        Returns:
            The node that answered it, its number of messages (the reply not counted), and the JSON array of the
            messages that follow; None when nothing matches.
        """
        found = [entry for entry in self._entries if raw.startswith(entry[0])]
        if not found:
            return None
        prefix, node, count = max(found, key=lambda entry: len(entry[0]))
        rest = raw.body[raw.begin + len(prefix) : raw.end].lstrip(_BLANK)
        return (node, count, b"[" + rest[1:]) if rest.startswith(b",") else None

    def remember(self, raw: RawText, node: Node, count: int) -> None:
        """Note that `node` answered the request with these `count` messages; drops what it continued."""
        end = _before_blank(raw.body, _before_blank(raw.body, raw.end) - 1)
        if end <= raw.begin or raw.body[end - 1 : end] != b"}":
            return
        prefix = RawText(raw.body, raw.begin, end)
        kept = [
            entry
            for entry in self._entries
            if entry[1] is not node.parent and not (len(entry[0]) == len(prefix) and prefix.startswith(entry[0]))
        ]
        self._entries = [*kept, (prefix, node, count)][-self._capacity :]


def _before_blank(body: bytes, end: int) -> int:
    """Where the text ends that white space up to `end` follows."""
    while end > 0 and body[end - 1] in _BLANK:
        end -= 1
    return end
