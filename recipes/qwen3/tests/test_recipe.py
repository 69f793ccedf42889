"""Every name of the recipe gives a valid configuration; targets that cannot run here say why."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from miles_loop import HardwareTarget, RunConfig
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_qwen3 import RECIPE
from miles_qwen3.cli import main


def config(*argv: str) -> RunConfig:
    return config_for(RECIPE, parse(argv, TRAIN_FLAGS))


@pytest.mark.parametrize("name", [t.name for t in RECIPE.hardware])
def test_every_target_prints_its_configuration(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--hardware", name, "--dry-run"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["hardware"] == name


@pytest.mark.parametrize("target", [t for t in RECIPE.hardware if t.name != "cpu"], ids=lambda t: t.name)
def test_a_gpu_target_is_refused_with_what_it_needs(target: HardwareTarget, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--hardware", target.name]) == 2
    assert "SGLang" in capsys.readouterr().err


@pytest.mark.parametrize("name", [t.name for t in RECIPE.tasks])
@pytest.mark.parametrize("model", [m.name for m in RECIPE.models])
def test_every_task_goes_with_every_model(name: str, model: str) -> None:
    made = config("--task", name, "--model", model)
    assert made.task.name == name
    assert made.model == model


def test_any_reasoning_gym_family_is_a_task() -> None:
    made = config("--task", "reasoning_gym:letter_counting", "--task.options.max_words", "5")
    assert (made.task.dataset, made.task.name, made.task.reward) == ("letter_counting", "letter_counting", "verifier")
    assert made.task.options == {"max_words": 5}


def test_sizes_that_the_family_names_are_covered() -> None:
    names = {t.name for t in RECIPE.hardware}
    assert {"h100-0.6b", "h100-4b", "h100-8b", "h100-32b", "h100-30b-a3b", "a100-8b", "b200-30b-a3b"} <= names


def test_command_line_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from miles_qwen3.cli import main; main(['train', '--dry-run']); "
        "bad = {'torch', 'transformers', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_an_interrupt_while_the_command_is_imported_is_no_traceback() -> None:
    code = (
        "import builtins, sys; from miles_qwen3 import cli; plain = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name.startswith('miles_loop'): raise KeyboardInterrupt\n"
        "    return plain(name, *rest)\n"
        "builtins.__import__ = interrupted; sys.exit(cli.main(['train']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
