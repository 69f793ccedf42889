"""Mathematical equality; slow comparisons are killed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest

from miles_contracts import Message, Task
from miles_rollout.rewards import MathMatch, score
from miles_rollout.rewards.child import ChildPool

pytest.importorskip("math_verify")


def task(label: object) -> Task:
    return Task(prompt_index=0, messages=(Message(role="user", content="q"),), label=label)


@pytest.fixture
async def maths() -> AsyncIterator[MathMatch]:
    match = MathMatch(timeout_s=60)
    yield match
    await match.close()


async def test_equal_and_different(maths: MathMatch) -> None:
    for label, response, expected in (
        ("1/2", "0.5", 1.0),
        ("1/2", "0.51", 0.0),
        ("2\\sqrt{2}", "thus $\\boxed{\\sqrt{8}}$", 1.0),
        ("2\\sqrt{2}", "thus $\\boxed{\\sqrt{7}}$", 0.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0),
        ("\\{1,2\\}", "\\boxed{\\{2, 1\\}}", 1.0),
        ("(1,3)", "(1,3)", 1.0),
        ("7", "no idea", 0.0),
        ("\\frac{\\pi}{2}", "The angle is \\boxed{90^\\circ}", 0.0),
    ):
        outcome = await score(maths, task(label), response)
        assert (label, response, outcome.value, outcome.error) == (label, response, expected, None)


async def test_a_label_without_mathematics_is_a_failure(maths: MathMatch) -> None:
    assert (await score(maths, task(None), "7")).value is None
    assert (await score(maths, task(""), "x")).value is None


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_a_slow_child_is_killed_and_replaced() -> None:
    code = """
import json, sys, time
for line in sys.stdin:
    if json.loads(line)["q"] == "slow": time.sleep(600)
    print("{}", flush=True)
"""
    pool = ChildPool(_python(code), processes=1, timeout_s=1.0)
    with pytest.raises(TimeoutError):
        await pool.ask({"q": "slow"})
    pool._timeout = 60
    assert await pool.ask({"q": "quick"}) == {}
    await pool.close()


@pytest.mark.parametrize("code", ["raise SystemExit", "input(); print('garbage')", "input(); print('[1]')"])
async def test_a_child_that_dies_or_talks_nonsense_is_a_failure(code: str) -> None:
    pool = ChildPool(_python(code), processes=1, timeout_s=60)
    with pytest.raises(Exception, match="ended or answered nonsense"):
        await pool.ask({"q": "x"})
    await pool.close()


@pytest.mark.parametrize("bad", [{"processes": 0}, {"timeout_s": 0}])
def test_bad_pools_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ChildPool(["x"], **({"processes": 1, "timeout_s": 1.0} | bad))
