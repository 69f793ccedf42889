"""The recipe of the tests: `python -m loop_toy.recipe train ...` is its command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from miles_contracts import Task
from miles_loop import HardwareTarget, ModelPreset, Recipe, TaskPreset, build_command


def vowels(task: Task, response: str) -> float:
    """Share of letters that are `e`: quickly learnt by any model that samples bytes."""
    return response.count("e") / max(len(response), 1)


def raising(task: Task, response: str) -> float:
    """Always raises."""
    raise RuntimeError("the reward is broken")


def not_a_number(task: Task, response: str) -> float:
    """Always NaN."""
    return float("nan")


def always_one(task: Task, response: str) -> float:
    """The same for every answer: nothing to learn."""
    return 1.0


RECIPE = Recipe(
    family="toy",
    summary="A toy for tests.",
    models=(
        ModelPreset(name="tiny", summary="1 layer", build="loop_toy.model:build"),
        ModelPreset(name="slow", summary="the same, as if it were heavy", build="loop_toy.model:build", heavy=True),
    ),
    tasks=(
        TaskPreset(
            name="vowels",
            summary="write many e",
            overrides={
                "task": {
                    "name": "vowels",
                    "source": "jsonl",
                    "path": str(Path(__file__).parent / "prompts.jsonl"),
                    "eval_size": 4,
                    "reward": "loop_toy.recipe:vowels",
                }
            },
        ),
        TaskPreset(
            name="sums",
            summary="add numbers",
            overrides={
                "task": {"name": "sums", "source": "reasoning_gym", "dataset": "basic_arithmetic", "eval_size": 4}
            },
        ),
    ),
    hardware=(
        HardwareTarget(name="cpu", summary="any machine"),
        HardwareTarget(name="h100", summary="one GPU", overrides={"engine": {"dtype": "bfloat16"}}, needs="a GPU"),
    ),
    defaults={
        "steps": 3,
        "rollout": {"groups_per_step": 2, "group_size": 4, "filter": "none", "sampling": {"max_new_tokens": 8}},
        "evaluation": {"sampling": {"max_new_tokens": 8}},
        "record": {"plot": False},
        "trainer": {"optimizer": {"lr": 0.01}},
    },
    examples=(("three steps", "miles-toy train --steps 3"),),
)

main: Callable[..., int] = build_command(RECIPE)

if __name__ == "__main__":
    sys.exit(main())
