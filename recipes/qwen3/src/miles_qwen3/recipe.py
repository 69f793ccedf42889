"""Qwen3 as data: models, tasks and defaults. The GPU targets are in `hardware`."""

from __future__ import annotations

from miles_loop import ModelPreset, Recipe, TaskPreset
from miles_qwen3.hardware import TARGETS
from miles_qwen3.sorting import HELD_OUT, HELD_OUT_FILE, LENGTH, TRAIN_FILE, data_file

STEPS = 150

SORT = TaskPreset(
    name="sort",
    summary="sort the letters of a short word; partial credit in training, exact match held out",
    overrides={
        "task": {
            "name": "sort",
            "source": "jsonl",
            "path": str(data_file(TRAIN_FILE)),
            "eval_path": str(data_file(HELD_OUT_FILE)),
            "eval_size": HELD_OUT,
            "reward": "miles_qwen3.sorting:closeness",
            "eval_reward": "exact",
        },
        # an answer, its end, and one token to learn that more is too many
        "rollout": {"sampling": {"max_new_tokens": LENGTH + 2}},
        "evaluation": {"sampling": {"max_new_tokens": LENGTH + 2}},
    },
)

RECIPE = Recipe(
    family="qwen3",
    summary="Reinforcement learning of Qwen3 models: dense and mixture-of-experts, from a laptop up.",
    models=(
        ModelPreset(
            name="tiny",
            summary="0.1 M parameters, random weights: learns the default task in under a minute on a CPU",
            build="miles_qwen3.model:build_tiny",
        ),
        ModelPreset(
            name="moe",
            summary="the same with 8 experts of which a token uses 2; the engine's choices are replayed in training",
            build="miles_qwen3.model:build_moe",
        ),
    ),
    tasks=(SORT,),
    hardware=TARGETS,
    defaults={
        "steps": STEPS,
        "pipeline_depth": 1,
        "rollout": {"groups_per_step": 16, "group_size": 16},
        "evaluation": {"every": 25},
        "trainer": {
            "optimizer": {
                "lr": 3e-3,
                "betas": (0.9, 0.99),
                "schedule": {"kind": "cosine", "warmup_steps": 10, "total_steps": STEPS, "final_factor": 0.1},
            },
            # a policy that starts uniform must not settle on its first lucky answers
            "objective": {"entropy_coefficient": 0.005},
        },
    },
    examples=(
        ("learn to sort letters, on this machine", "miles-qwen3 train --hardware cpu"),
        ("a mixture of experts, its routing replayed", "miles-qwen3 train --hardware cpu --model moe"),
        (
            "your own prompts and your own reward",
            "miles-qwen3 train --task prompts.jsonl --task.reward my_rewards:score",
        ),
        ("continue a run that was stopped or killed", "miles-qwen3 train --resume runs/qwen3-..."),
        ("what a GPU target would run", "miles-qwen3 train --hardware h100-8b --dry-run"),
    ),
)
