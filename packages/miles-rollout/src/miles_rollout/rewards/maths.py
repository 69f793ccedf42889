"""Mathematical equality of answer and label: numbers exactly, everything else by math-verify in a child process."""

from __future__ import annotations

import importlib.util
import sys

from miles_contracts import InvalidFieldError, Task
from miles_rollout.rewards.child import ChildPool
from miles_rollout.rewards.matching import exact_label, extract_number, is_plain_number, last_boxed


class MathMatch:
    """1.0 when the answer equals the label mathematically, else 0.0.

    Where label and answer are plain numbers they are compared as fractions, at once. Everything else (sets,
    intervals, roots, symbolic expressions) goes to math-verify, whose simplification may run for ever on some
    inputs: it runs in child processes that are killed when they are too slow, which fails the trajectory.

    Args:
        timeout_s: seconds for one comparison.
        processes: child processes at most; each is started when it is first needed and costs about 100 MB.

    Raises:
        InvalidFieldError: math-verify is not installed.
    """

    def __init__(self, *, timeout_s: float = 10.0, processes: int = 1) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise InvalidFieldError(
                "reward",
                "maths",
                "this reward needs the extra: pip install 'miles-rollout[tasks]' (NumericMatch needs nothing)",
            )
        command = [sys.executable, "-m", "miles_rollout.rewards.math_child"]
        self._pool = ChildPool(command, processes=processes, timeout_s=timeout_s)

    async def __call__(self, task: Task, response: str) -> float:
        if (problem := exact_label(task.label)) is not None:
            raise InvalidFieldError("label", task.label, f"prompt {task.prompt_index} of {task.source!r}: {problem}")
        label = str(task.label)
        boxed = last_boxed(response)
        if is_plain_number(label) and is_plain_number(boxed if boxed is not None else response):
            return float(extract_number(label) == extract_number(response))
        answer = await self._pool.ask({"label": label, "response": response})
        if "error" in answer:
            raise ValueError(f"math-verify: {answer['error']}")
        return float(answer["equal"])

    async def close(self) -> None:
        """End the child processes."""
        await self._pool.close()
