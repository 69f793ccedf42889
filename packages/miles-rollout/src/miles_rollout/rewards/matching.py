"""Exact and numeric comparison of an answer with the label of its task."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation, localcontext
from fractions import Fraction
from typing import Any

from miles_contracts import InvalidFieldError, Task

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKED = re.compile(r"(?:####|final answer(?: is)?\s*:?|answer(?: is)?\s*:)\s*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.])"  # not inside a word or another number
    r"(?P<sign>[+-]\s?)?[$€£]?"
    r"(?:\\[dt]?frac\{(?P<fn>[+-]?\d+)\}\{(?P<fd>[+-]?\d+)\}"
    r"|(?P<whole>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d*|\.\d+|\d+)"
    r"(?P<exp>[eE][+-]?\d+)?"
    r"(?:\s?/\s?(?P<den>\d+(?:\.\d+)?))?)"
    r"(?P<percent>\s?\\?%)?"
)
_MAX_DIGITS = 400


def exact_label(label: Any) -> str | None:
    """Why `label` cannot be compared as text, or None when it can."""
    if label is None:
        return "it has no label"
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return f"the label must be text or a number, got {type(label).__name__}"
    return None


def numeric_label(label: Any) -> str | None:
    """Why `label` cannot be compared as a number, or None when it can."""
    problem = exact_label(label)
    if problem is None and extract_number(str(label)) is None:
        return f"there is no number in the label {label!r}"
    return problem


class ExactMatch:
    """1.0 when the answer equals the label as text, else 0.0.

    Args:
        strip: ignore white space around both.
        casefold: ignore case.
        tag: compare only what the last `<tag>...</tag>` holds, when the answer has one.
    """

    def __init__(self, *, strip: bool = True, casefold: bool = False, tag: str | None = "answer") -> None:
        self._strip = strip
        self._casefold = casefold
        self._tag = re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL) if tag else None

    def __call__(self, task: Task, response: str) -> float:
        if (problem := exact_label(task.label)) is not None:
            raise InvalidFieldError("label", task.label, f"prompt {task.prompt_index} of {task.source!r}: {problem}")
        if self._tag is not None and (found := self._tag.findall(response)):
            response = found[-1]
        return float(self._normal(response) == self._normal(str(task.label)))

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        text = text.strip() if self._strip else text
        return text.casefold() if self._casefold else text


class NumericMatch:
    """1.0 when the number in the answer equals the label's number, else 0.0; an answer without one is 0.0.

    Which number of the answer counts: that in the last `\\boxed{}`, else in the last `<answer>` tag, else
    after the last "####" or "answer:", else the last number of the text.

    Args:
        tolerance: largest accepted relative difference; 0 compares exactly, as fractions.
    """

    def __init__(self, *, tolerance: float = 0.0) -> None:
        if not 0 <= tolerance < 1:
            raise InvalidFieldError("tolerance", tolerance, "use a relative tolerance in [0, 1)")
        self._tolerance = Fraction(tolerance)

    def __call__(self, task: Task, response: str) -> float:
        if (problem := numeric_label(task.label)) is not None:
            raise InvalidFieldError("label", task.label, f"prompt {task.prompt_index} of {task.source!r}: {problem}")
        expected = extract_number(str(task.label))
        assert expected is not None  # the check above has looked for it
        given = extract_number(response)
        if given is None:
            return 0.0
        return float(abs(given - expected) <= self._tolerance * abs(expected))


def extract_number(text: str) -> Fraction | None:
    """The number that `text` gives as its answer, exactly, or None when it has none.

    Understands signs, thousands separators, decimals, exponents, fractions (`3/4`, `\\frac{3}{4}`), currency
    signs and percent (`50%` is 1/2).
    """
    text = text.replace("\u2212", "-").replace("\\!", "").replace("\\,", "").replace("{,}", ",")
    for part in _answer_parts(text):
        found = None
        for match in _NUMBER.finditer(part):
            value = _value(match)
            found = value if value is not None else found
        if found is not None:
            return found
    return None


def is_plain_number(text: str) -> bool:
    """True when `text` is one number and nothing else (white space and dollar signs aside)."""
    match = _NUMBER.fullmatch(text.strip().strip("$").strip())
    return match is not None and _value(match) is not None


def _answer_parts(text: str) -> list[str]:
    parts = []
    if (boxed := last_boxed(text)) is not None:
        parts.append(boxed)
    if tagged := _TAGGED.findall(text):
        parts.append(tagged[-1])
    if marked := _MARKED.findall(text):
        parts.append(marked[-1])
    return [*parts, text]


def last_boxed(text: str) -> str | None:
    """Contents of the last `\\boxed{...}` with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start + len("\\boxed{") : position]
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MAX_DIGITS or (match["exp"] and abs(int(match["exp"][1:])) > _MAX_DIGITS):
        return None  # hostile input: exact arithmetic on it would stall the event loop
    if match["fn"] is not None:
        if int(match["fd"]) == 0:
            return None
        value = Fraction(int(match["fn"]), int(match["fd"]))
    else:
        try:
            with localcontext() as context:
                context.prec = _MAX_DIGITS
                value = Fraction(Decimal(match["whole"].replace(",", "") + (match["exp"] or "")))
        except InvalidOperation:
            return None
        if match["den"] is not None:
            if Fraction(match["den"]) == 0:
                return None
            value /= Fraction(match["den"])
    if match["percent"]:
        value /= 100
    return -value if match["sign"] and match["sign"][0] == "-" else value
