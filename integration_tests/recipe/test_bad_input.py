"""Bad input is refused early, by name, with the remedy; exit status 2."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from recipe_runs import SMALL, Shell, records


def prompts(folder: Path, text: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text(text)
    return file


GOOD = '{"prompt": "sort ba", "label": "ab"}\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stepz", 3), ("stepz", "steps")),
        (("--trainer.optimizer.lrr", 1), ("lrr", "trainer.optimizer.lr")),
        (("--steps", "many"), ("steps", "many")),
        (("--steps", 0), ("steps", "0")),
        (("--hardware", "h100"), ("hardware", "h100")),
        (("--task", "sor"), ("sor", "sort")),
        (("--task", "missing.jsonl"), ("missing.jsonl", "cannot be read")),
        (("--task.dataset", "basic_arithmetics", "--task.reward", "verifier"), ("basic_arithmetic",)),
        (("--task", "reasoning_gym:chain_sumx"), ("task.dataset: got 'chain_sumx'; did you mean chain_sum",)),
        (("--task.reward", "exactt"), ("task.reward", "exact")),
        (("--task.reward", "no_such_module:score"), ("reward", "no_such_module")),
        (("--model", "no/such/folder"), ("model", "no/such/folder", "tiny")),
        (("--rollout.group_size", 1), ("rollout.group_size", "no_signal")),
        (("--engine.max_context", 8), ("max_tokens", "alone has")),
        (("--resume", "no/such/run"), ("no/such/run",)),
        (("--config", "missing.toml"), ("missing.toml",)),
    ],
)
def test_refused(shell: Shell, words: tuple[object, ...], said: tuple[str, ...]) -> None:
    out = shell.run("miles-qwen3", "train", *words, status=2)
    for part in said:
        assert part in out
    assert "Traceback" not in out


def test_broken_lines_are_all_named(shell: Shell, tmp_path: Path) -> None:
    file = prompts(tmp_path, GOOD + "{broken\n" + GOOD + '{"label": 1}\n')
    out = shell.run("miles-qwen3", "train", "--task", file, status=2)
    assert "line 2" in out
    assert "line 4" in out


def test_model_folder_without_weights(shell: Shell, tmp_path: Path) -> None:
    from miles_qwen3.model import build_tiny

    folder = tmp_path / "model"
    folder.mkdir()
    build_tiny(folder, 0)
    (folder / "model.safetensors").unlink()
    out = shell.run("miles-qwen3", "train", "--model", folder, status=2)
    assert "no weights" in out


def test_port_taken(shell: Shell, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--engine.port", port, "--run-dir", tmp_path / "run", "--steps", 1, *SMALL)
        process = shell.start("miles-qwen3", "train", *words)
        out, err = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    assert str(port) in out + err


@pytest.mark.parametrize(
    ("body", "said"), [("raise RuntimeError('broken on purpose')", "broken on purpose"), ("return float('nan')", "nan")]
)
def test_reward_that_raises_or_is_not_a_number(shell: Shell, tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "my_reward.py").write_text(f"def score(task, response):\n    {body}\n")
    words = ("--task.reward", "my_reward:score", "--run-dir", tmp_path / "run", "--steps", 1, *SMALL)
    out = shell.run("miles-qwen3", "train", *words, status=1)
    assert said in out.lower()


def test_empty_completions_are_trained_and_counted(shell: Shell, tmp_path: Path) -> None:
    """A policy that ends at once samples one token, its end; nothing is lost and nothing divides by zero."""
    (tmp_path / "my_reward.py").write_text("def score(task, response):\n    return float(not response)\n")
    run = tmp_path / "run"
    words = ("--task.reward", "my_reward:score", "--task.eval_reward", "exact", "--rollout.sampling.stop", "a,b,c,e")
    shell.run("miles-qwen3", "train", *words, "--run-dir", run, "--steps", 2, *SMALL)
    assert records(run)[-1]["step"] == 2
