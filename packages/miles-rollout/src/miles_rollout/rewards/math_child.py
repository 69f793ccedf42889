"""Child process of `MathMatch`: one JSON question a line on standard input, one JSON answer a line back."""

from __future__ import annotations

import json
import sys


def _anchored(text: str) -> str:
    """A bare expression as LaTeX mathematics: without an anchor the parser looks for plain numbers only."""
    return text if "$" in text or "\\boxed" in text or len(text) > 200 else f"${text.strip()}$"


def main() -> None:
    """Answer until standard input ends."""
    from math_verify import parse, verify

    for line in sys.stdin:
        question = json.loads(line)
        try:
            gold = parse(_anchored(question["label"]), raise_on_error=True)
            if not gold:
                raise ValueError(f"the label {question['label']!r} has no mathematical expression")
            response = question["response"]
            equal = verify(gold, parse(response)) or verify(gold, parse(_anchored(response)))
            answer: dict[str, object] = {"equal": bool(equal)}
        except Exception as error:  # noqa: BLE001 - request boundary of this process
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
