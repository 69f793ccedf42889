"""How long a prompt and its completion may be: what the engine with the least room says, or what was set."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class ContextWindow:
    """Room for a prompt and its completion.

    Any engine may get any session, so the smallest counts.

    Args:
        fixed: tokens; wins over what engines say. None to go by those.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._said: dict[str, int] = {}

    @property
    def tokens(self) -> int | None:
        """Most tokens; None while nobody has said."""
        return self._fixed if self._fixed is not None else min(self._said.values(), default=None)

    def note(self, engine: str, tokens: int | None) -> None:
        """What an engine says now, None for nothing; a value that is set but does not fit there is warned of."""
        before = self.tokens
        if tokens is None:
            self._said.pop(engine, None)
        else:
            self._said[engine] = tokens
        if self._fixed is not None and tokens is not None and tokens < self._fixed:
            _log.warning(
                "a context of %d tokens is set, and engine %s takes %d: it will refuse longer prompts itself",
                self._fixed,
                engine,
                tokens,
            )
        elif self.tokens != before:
            _log.info("prompt and completion have %s tokens together (engine %s)", self.tokens, engine)
