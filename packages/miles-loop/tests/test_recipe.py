"""Presets are layers; what is said later wins."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from loop_toy.recipe import RECIPE, main

from miles_contracts import InvalidFieldError
from miles_loop import HardwareTarget, ModelPreset, Recipe, TaskPreset
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.config import RunConfig
from miles_loop.reference import help_text, markdown

LAYERED = Recipe(
    family="layered",
    summary="",
    models=(ModelPreset(name="m", summary="", build="x:y", overrides={"seed": 2, "steps": 2}),),
    tasks=(
        TaskPreset(
            name="t", summary="", overrides={"steps": 3, "seed": 3, "task": {"path": "p.jsonl", "eval_size": 7}}
        ),
    ),
    hardware=(HardwareTarget(name="h", summary="", overrides={"steps": 4}),),
    defaults={"steps": 1, "seed": 1, "pipeline_depth": 5},
)


def config(*argv: str, recipe: Recipe = LAYERED) -> RunConfig:
    return config_for(recipe, parse(argv, TRAIN_FLAGS))


def test_defaults_model_task_hardware_file_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 5\n[task]\neval_size = 9\n")
    assert (config().steps, config().seed, config().pipeline_depth, config().task.eval_size) == (4, 3, 5, 7)
    assert config("--config", str(file)).steps == 5
    assert config("--config", str(file)).task.eval_size == 9
    assert config("--config", str(file), "--steps", "6").steps == 6


def test_a_file_chooses_presets_too(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('hardware = "h100"\n[task]\npreset = "sums"\n')
    chosen = config("--config", str(file), recipe=RECIPE)
    assert (chosen.hardware, chosen.engine.dtype, chosen.task.name) == ("h100", "bfloat16", "sums")
    assert config("--config", str(file), "--task", "vowels", recipe=RECIPE).task.name == "vowels"


def test_a_file_of_prompts_is_a_task(tmp_path: Path) -> None:
    chosen = config("--task", "my/prompts.jsonl", recipe=RECIPE).task
    assert (str(chosen.path), chosen.name, chosen.preset) == ("my/prompts.jsonl", "prompts", None)


def test_a_family_of_problems_is_a_task() -> None:
    chosen = config("--task.dataset", "leg_counting", recipe=RECIPE).task
    assert (chosen.source, chosen.name, chosen.path) == ("reasoning_gym", "leg_counting", None)


def test_a_model_folder_has_no_overrides() -> None:
    assert config("--model", "/some/folder").seed == 3
    assert config("--model", "/some/folder").model == "/some/folder"


def test_dry_run_prints_a_configuration_that_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["train", "--dry-run", "--trainer.optimizer.lr", "1e-5", "--trainer.optimizer.max_grad_norm", "none"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["trainer"]["optimizer"]["lr"] == 1e-5
    file = tmp_path / "again.toml"
    file.write_text(printed)
    assert main(["train", "--dry-run", "--config", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_a_recipe_needs_names_that_differ() -> None:
    with pytest.raises(InvalidFieldError, match=r"Recipe\.models"):
        Recipe(family="x", summary="", models=(), tasks=LAYERED.tasks, hardware=LAYERED.hardware)


@pytest.mark.parametrize(
    ("command", "example"),
    [("train", "train --steps 3"), ("eval", "eval --run runs/first"), ("export", "export runs/first my-model")],
)
def test_help_teaches(command: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: miles-toy {command}" in shown
    examples = [line for line in shown.partition("\nexamples:\n")[2].splitlines() if "#" not in line]
    assert examples[0] == f"  miles-toy {example}"
    assert all(line.startswith(f"  miles-toy {command} ") for line in examples)
    assert max(map(len, shown.splitlines())) <= 120
    if command == "train":
        for expected in ("--pipeline-depth", "--resume RUN", "vowels", "needs a GPU", "--trainer.optimizer.lr"):
            assert expected in shown


def test_an_empty_command_line_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "export" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_the_reference_holds_every_option() -> None:
    reference = markdown()
    for expected in (
        "| `--steps` | int | `100` |",
        "## trainer.optimizer",
        "`--checkpoint.every`, `--checkpoint-every`",
    ):
        assert expected in reference
    assert reference == markdown()


def test_help_text_is_a_function_of_the_recipe() -> None:
    assert help_text(LAYERED, "train", "s", TRAIN_FLAGS).startswith("usage: miles-layered train [options]")


def test_the_driver_imports_no_torch() -> None:
    modules = "miles_loop.command, miles_loop.run_session, miles_loop.assembly, miles_loop.driver, miles_loop.display"
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert _python(code) == "[]"


def test_a_recipe_costs_no_heavy_import() -> None:
    code = "import sys, miles_loop; print(sorted({'torch', 'pydantic', 'aiohttp', 'rich'} & sys.modules.keys()))"
    assert _python(code) == "[]"


def _python(code: str) -> Any:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_unknown_task_is_told_every_form() -> None:
    with pytest.raises(InvalidFieldError, match=r"use one of vowels, sums, or FILE.jsonl, or reasoning_gym:NAME$"):
        RECIPE.task_named("nosuch")
