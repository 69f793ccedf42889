"""Exact and numeric matching."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError, Message, Task
from miles_rollout.rewards import ExactMatch, NumericMatch, extract_number
from miles_rollout.rewards.matching import is_plain_number, last_boxed


def task(label: object) -> Task:
    return Task(prompt_index=3, messages=(Message(role="user", content="q"),), label=label, source="s")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("-7", -7),
        ("\u22127", -7),
        ("+3", 3),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("12,34", 34),  # no thousands separator: two numbers
        ("1{,}000", 1000),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("2e3", 2000),
        ("1.5E-2", Fraction(3, 200)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("\\frac{1}{3}", Fraction(1, 3)),
        ("-\\dfrac{2}{6}", Fraction(-1, 3)),
        ("50%", Fraction(1, 2)),
        ("12.5 \\%", Fraction(1, 8)),
        ("$1,200", 1200),
        ("-$5", -5),
        ("the answer is 12.", 12),
        ("0.1 + 0.2 = 0.3", Fraction(3, 10)),
        ("x1 is 5", 5),
        ("It took 3 days and 4 nights", 4),
        ("4 apples\n#### 72", 72),
        ("#### 72\nsee note 9 of 10", 72),
        ("Final answer: 8 (of 10)", 10),
        ("so 3 < 4, answer is: -2", -2),
        ("<answer>6</answer> or 7", 6),
        ("first <answer>5</answer> then <answer>6</answer>", 6),
        ("\\boxed{1} ... \\boxed{\\frac{7}{2}} 100", Fraction(7, 2)),
        ("\\boxed{no number} 9", 9),
        ("9-5", 5),
        ("7 - 5", -5),
    ],
)
def test_extract_number(text: str, number: Fraction | int) -> None:
    assert extract_number(text) == number


@pytest.mark.parametrize("text", ["", "none", "v2", "1/0", "\\frac{1}{0}", "9" * 500, "1e99999"])
def test_texts_without_a_number(text: str) -> None:
    assert extract_number(text) is None


@given(st.integers(-(10**30), 10**30))
def test_any_integer_in_any_dress(value: int) -> None:
    for text in (
        f"{value}",
        f"{value:,}",
        f"The answer is {value}.",
        f"\\boxed{{{value}}}",
        f"<answer> {value} </answer>",
    ):
        assert extract_number(text) == value


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=6))
def test_any_decimal(value) -> None:
    assert extract_number(f"x = {value:f}") == Fraction(value)


@given(st.text(max_size=300))
def test_no_text_raises(text: str) -> None:
    extract_number(text)
    is_plain_number(text)
    last_boxed(text)


@given(st.text(alphabet="0123456789.,-+eE/%${}\\frac ", max_size=120))
def test_no_number_like_text_raises(text: str) -> None:
    extract_number(text)


def test_boxes_nest_and_may_be_open() -> None:
    assert last_boxed("\\boxed{a{b}c}") == "a{b}c"
    assert last_boxed("\\boxed{open") is None
    assert last_boxed("none") is None


def test_numeric_match() -> None:
    match = NumericMatch()
    assert match(task("1/2"), "I get 0.5") == 1.0
    assert match(task(0.1), "0.1") == 1.0
    assert match(task(3), "four") == 0.0
    assert match(task(100), "101") == 0.0
    assert NumericMatch(tolerance=0.02)(task(100), "101") == 1.0
    assert NumericMatch(tolerance=0.02)(task(0), "0.01") == 0.0


def test_numeric_match_needs_a_number_to_compare_with() -> None:
    for label in (None, "seven"):
        with pytest.raises(InvalidFieldError, match="prompt 3 of 's'"):
            NumericMatch()(task(label), "7")
    with pytest.raises(InvalidFieldError, match="tolerance"):
        NumericMatch(tolerance=1.0)


def test_exact_match() -> None:
    assert ExactMatch()(task("yes"), "  yes\n") == 1.0
    assert ExactMatch()(task("yes"), "Yes") == 0.0
    assert ExactMatch(casefold=True)(task("yes"), "YES") == 1.0
    assert ExactMatch(strip=False)(task("yes"), " yes") == 0.0
    assert ExactMatch()(task("yes"), "no\n<answer> maybe</answer><answer>yes </answer>!") == 1.0
    assert ExactMatch(tag=None)(task("yes"), "<answer>yes</answer>") == 0.0
    assert ExactMatch()(task(12), "12") == 1.0
    assert ExactMatch()(task("\u00e9"), "e\u0301") == 1.0
    with pytest.raises(InvalidFieldError, match="no label"):
        ExactMatch()(task(None), "x")


@pytest.mark.parametrize(
    ("text", "plain"), [("12", True), (" $3/4$ ", True), ("-1.5e3", True), ("x=3", False), ("1 2", False), ("", False)]
)
def test_plain_numbers(text: str, plain: bool) -> None:
    assert is_plain_number(text) is plain
