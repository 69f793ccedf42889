"""The command `miles-qwen3`."""

from __future__ import annotations

from collections.abc import Sequence

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status.

    What it needs is imported here, so that Ctrl-C ends it in silence from its first moment on.
    """
    try:
        from miles_loop import build_command
        from miles_qwen3.recipe import RECIPE

        return build_command(RECIPE)(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
