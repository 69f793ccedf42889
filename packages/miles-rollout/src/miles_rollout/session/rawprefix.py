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
        # A list, not a dictionary: hashing a whole conversation would cost more than comparing it with a few.
        self._entries: list[tuple[bytes, Node, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(len(prefix) for prefix, _, _ in self._entries)

    def find(self, raw: bytes) -> tuple[Node, int, bytes] | None:
        """The longest remembered request that this one continues.

        Args:
            raw: JSON text of the request's `messages`, already known to be valid JSON.

        Returns:
            The node that answered it, its number of messages (the reply not counted), and the JSON array of the
            messages that follow; None when nothing matches.
        """
        found = [entry for entry in self._entries if len(entry[0]) < len(raw) and raw.startswith(entry[0])]
        if not found:
            return None
        prefix, node, count = max(found, key=lambda entry: len(entry[0]))
        rest = raw[len(prefix) :].lstrip(_BLANK)
        return (node, count, b"[" + rest[1:]) if rest.startswith(b",") else None

    def remember(self, raw: bytes, node: Node, count: int) -> None:
        """Note that `node` answered the request with these `count` messages; drops what it continued."""
        prefix = raw.rstrip(_BLANK)[:-1].rstrip(_BLANK)
        if not prefix.endswith(b"}"):
            return
        kept = [e for e in self._entries if e[1] is not node.parent and e[0] != prefix]
        self._entries = [*kept, (prefix, node, count)][-self._capacity :]
