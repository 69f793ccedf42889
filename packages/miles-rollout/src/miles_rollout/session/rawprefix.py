"""Recognise by its bytes the part of a request that was matched before, so that only the new part is decoded.

A client sends its whole history every turn. The JSON text of the `messages` array, without its closing bracket,
is a prefix of the next request's text when the client repeats itself, and a JSON text with that prefix starts
with exactly those messages. Comparing it costs one `memcmp`; decoding and matching are left for what follows.
"""

from __future__ import annotations

from miles_rollout.session.nodes import Node

_BLANK = b" \t\r\n"


class RawPrefixes:
    """The last few requests of a session, by the text of their messages.

    Args:
        capacity: how many conversations are remembered (one per branch that is being continued).
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._entries: dict[bytes, tuple[Node, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(map(len, self._entries))

    def find(self, raw: bytes) -> tuple[Node, int, bytes] | None:
        """The longest remembered request that this one continues.

        Args:
            raw: JSON text of the request's `messages`, already known to be valid JSON.

        Returns:
            The node that answered it, its number of messages (the reply not counted), and the JSON array of the
            messages that follow; None when nothing matches.
        """
        best = b""
        for prefix in self._entries:
            if len(best) < len(prefix) < len(raw) and raw.startswith(prefix):
                best = prefix
        if not best:
            return None
        rest = raw[len(best) :].lstrip(_BLANK)
        if not rest.startswith(b","):
            return None
        node, count = self._entries[best]
        return node, count, b"[" + rest[1:]

    def remember(self, raw: bytes, node: Node, count: int) -> None:
        """Note that `node` answered the request with these `count` messages; drops what it continued."""
        prefix = raw.rstrip(_BLANK)[:-1].rstrip(_BLANK)
        if not prefix.endswith(b"}"):
            return
        for old in [old for old, (held, _) in self._entries.items() if held is node.parent]:
            del self._entries[old]
        self._entries.pop(prefix, None)
        self._entries[prefix] = (node, count)
        while len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]
