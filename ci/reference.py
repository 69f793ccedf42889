"""Writes docs/configuration.md from the configuration models; `--check` exits 1 when it is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from miles_loop.reference import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def main(check: bool) -> int:
    """Write or compare the page."""
    text = markdown().rstrip() + "\n"
    if check:
        if PAGE.exists() and PAGE.read_text("utf-8") == text:
            return 0
        print("docs/configuration.md is out of date: run `python ci/reference.py`", file=sys.stderr)
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
