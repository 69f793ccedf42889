"""Says what a start waits for, so that nobody looks at a silent screen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

ATTACHED_LATE_S = 3.0
"""An engine that runs already answers at once: one that does not is most likely a wrong address."""
PROCESS_LATE_S = 10.0
"""A process of the run first has to load a model."""


@contextlib.asynccontextmanager
async def said_when_late(on_event: Callable[[str], None], text: str, after_s: float) -> AsyncIterator[None]:
    """Tell `text` once when the body takes longer than `after_s` seconds."""
    timer = asyncio.get_running_loop().call_later(after_s, on_event, text)
    try:
        yield
    finally:
        timer.cancel()
