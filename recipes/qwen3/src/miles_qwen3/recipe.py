"""The Qwen3 recipe: models, tasks and hardware targets by name. Data only."""

from __future__ import annotations

from miles_loop import ModelPreset, Recipe, TaskPreset
from miles_qwen3 import trail
from miles_qwen3.hardware import TARGETS
from miles_qwen3.sorting import HELD_OUT, HELD_OUT_FILE, LENGTH, TRAIN_FILE, data_file

STEPS = 150

MODELS = (
    ModelPreset(
        name="tiny",
        summary="Qwen3, 2 layers, 64 hidden, 0.1 M parameters; random weights made by the run's seed",
        build="miles_qwen3.model:build_tiny",
    ),
    ModelPreset(
        name="tiny-tools",
        summary="as tiny, with short calls for the task trail and attention that starts out copying",
        build="miles_qwen3.model:build_tiny_tools",
    ),
    ModelPreset(
        name="moe",
        summary="Qwen3-MoE, as tiny with 8 experts of which 2 are used; the engine's routing is replayed",
        build="miles_qwen3.model:build_moe",
    ),
    ModelPreset(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, pretrained; from the packages of the extra smollm2, 0.5 GB on disk",
        build="miles_qwen3.smollm2:build",
        heavy=True,
        overrides={
            "steps": 40,
            "evaluation": {"every": 10},
            "engine": {"threads": 2},
            "runtime": {"trainer_threads": 2},
            "trainer": {
                "optimizer": {
                    "lr": 1e-5,
                    "betas": (0.9, 0.95),
                    "schedule": {"kind": "constant", "warmup_steps": 2, "total_steps": None},
                },
                "objective": {"entropy_coefficient": 0.0},
            },
            "rollout": {"groups_per_step": 4, "group_size": 8},
        },
    ),
)

SORT = TaskPreset(
    name="sort",
    summary="sort five digits; partial credit in training, exact match on held-out rows",
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
        # the digits, the end, and one token to learn that more is too many
        "rollout": {"sampling": {"max_new_tokens": LENGTH + 2}},
        "evaluation": {"sampling": {"max_new_tokens": LENGTH + 2}},
    },
)

GUESS = TaskPreset(
    name="guess",
    summary="a game of several turns through the session server: find a digit by higher and lower; held-out ranges",
    overrides={
        "task": {
            "name": "guess",
            "source": "jsonl",
            "path": str(data_file("guess_train.jsonl")),
            "eval_path": str(data_file("guess_held_out.jsonl")),
            "eval_size": 49,
            "agent": "miles_qwen3.guessing:play",
        },
        "rollout": {"sampling": {"max_new_tokens": 3}},
        "evaluation": {"sampling": {"max_new_tokens": 3}},
    },
)

TRAIL = TaskPreset(
    name="trail",
    summary="a game of tool calls through the session server: follow notes; held-out trails, won or not",
    overrides={
        "model": "tiny-tools",
        # when all games are won, groups whose answers differ become rare, and steps slow
        "steps": 130,
        "trainer": {
            # longer than the run: a seed that comes late upon the second note still has the rate to learn from it
            "optimizer": {"schedule": {"total_steps": 200}},
            "objective": {"entropy_coefficient": 0.01},
        },
        "task": {
            "name": "trail",
            "source": "jsonl",
            "path": str(data_file(trail.TRAIN_FILE)),
            "eval_path": str(data_file(trail.HELD_OUT_FILE)),
            "eval_size": trail.HELD_OUT,
            "agent": "miles_qwen3.trail_agent:play",
        },
        # a call, the end, and one token to learn that more is too many
        "rollout": {"groups_per_step": 16, "sampling": {"max_new_tokens": 5}},
        "evaluation": {"sampling": {"max_new_tokens": 5}},
    },
)

ADD = TaskPreset(
    name="add",
    summary="sums and differences of two numbers (reasoning-gym), the last number counts; for pretrained models",
    overrides={
        "task": {
            "name": "add",
            "source": "reasoning_gym",
            "dataset": "chain_sum",
            "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            "template": "{question}\nAnswer with the number only.",
            "size": 2048,
            "eval_size": 64,
            "reward": "numeric",
        },
        "rollout": {"sampling": {"max_new_tokens": 16}},
        "evaluation": {"sampling": {"max_new_tokens": 16}},
    },
)

RECIPE = Recipe(
    family="qwen3",
    summary="Qwen3: train a small model on this machine, or a large one on GPUs.",
    models=MODELS,
    tasks=(SORT, GUESS, TRAIL, ADD),
    hardware=TARGETS,
    defaults={
        "steps": STEPS,
        "pipeline_depth": 1,
        "rollout": {"groups_per_step": 8, "group_size": 16},
        "trainer": {
            # No division by the group's standard deviation: early on most groups differ by one lucky letter, and
            # dividing by that small deviation makes luck as loud as skill.
            "advantage": {"estimator": "dr_grpo"},
            "objective": {"entropy_coefficient": 0.005},
            "optimizer": {
                "lr": 3e-3,
                "betas": (0.9, 0.99),
                "schedule": {"kind": "cosine", "warmup_steps": 10, "total_steps": STEPS, "final_factor": 0.1},
            },
        },
    },
    examples=(
        (
            "train the default model on the default task, about a minute on two cores",
            "miles-qwen3 train --hardware cpu",
        ),
        ("mixture of experts, with the engine's routing replayed in the trainer", "miles-qwen3 train --model moe"),
        ("your own prompts", "miles-qwen3 train --task prompts.jsonl --task.reward exact"),
        ("what would run on eight H100", "miles-qwen3 train --hardware h100-4b --dry-run"),
    ),
)
