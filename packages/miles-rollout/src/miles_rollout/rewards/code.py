"""Code as an answer: it runs in the sandbox against the tests of its task."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, Task
from miles_rollout.rewards.sandbox import Sandbox

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


class IoTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program gets `input` on standard input and must print `output` (trailing white space aside)."""

    input: str
    output: str


class CodeReward:
    """Share of the task's tests that the program in the answer passes, or 1.0 only for all of them.

    The program is the last fenced block of the answer, or the whole answer without one. The tests are in
    `task.metadata["tests"]`: a list of `{"input": ..., "output": ...}`, or a list of Python statements (for
    example `assert add(1, 2) == 3`), each appended to the program and run apart.

    Args:
        sandbox: where programs run.
        partial: give the share of passed tests; False gives 1.0 or 0.0.
    """

    def __init__(self, sandbox: Sandbox, *, partial: bool = False) -> None:
        self._sandbox = sandbox
        self._partial = partial

    async def __call__(self, task: Task, response: str) -> float:
        tests = parse_tests(task)
        code = extract_code(response)
        passed = await asyncio.gather(*(self._passes(code, test) for test in tests))
        return sum(passed) / len(passed) if self._partial else float(all(passed))

    async def _passes(self, code: str, test: IoTest | str) -> bool:
        if isinstance(test, IoTest):
            run = await self._sandbox.run(code, stdin=test.input)
            return run.status == 0 and _lines(run.out) == _lines(test.output)
        # Exit status 0 alone proves nothing: the program may end itself before the test is reached.
        mark = "tests-were-reached"
        source = f"{code}\n\n{test}\n\nimport sys as _sys\n_sys.stderr.write({mark!r})\n"
        run = await self._sandbox.run(source)
        return run.status == 0 and run.err.endswith(mark)


def extract_code(response: str) -> str:
    """The last fenced block, or the whole text."""
    blocks: list[str] = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(task: Task) -> list[IoTest | str]:
    """The tests of a task.

    Raises:
        InvalidFieldError: none, or in another form.
    """
    tests: Any = task.metadata.get("tests")
    try:
        found = msgspec.convert(tests, list[IoTest | str])
    except msgspec.ValidationError as error:
        raise InvalidFieldError("task.metadata.tests", tests, f"prompt {task.prompt_index}: {error}") from error
    if not found:
        raise InvalidFieldError("task.metadata.tests", tests, f"prompt {task.prompt_index} has no tests")
    return found


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
