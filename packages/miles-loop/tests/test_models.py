"""From a name to a model folder."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from loop_toy.recipe import RECIPE

from miles_contracts import InvalidFieldError
from miles_loop import HardwareTarget, ModelPreset, Recipe, TaskPreset
from miles_loop.errors import RunError
from miles_loop.models import max_context, resolve_model


def resolve(name: str, folder: Path, recipe: Recipe = RECIPE, seed: int = 0) -> tuple[Path, list[str]]:
    """The folder, and what was said."""
    said: list[str] = []
    return asyncio.run(resolve_model(recipe, name, seed, folder / "model", said.append)), said


def recipe_with(build: str, *, heavy: bool) -> Recipe:
    """A recipe with one model."""
    return Recipe(
        family="one",
        summary="",
        models=(ModelPreset(name="m", summary="", build=build, heavy=heavy),),
        tasks=(TaskPreset(name="t", summary=""),),
        hardware=(HardwareTarget(name="cpu", summary=""),),
    )


def test_a_light_model_is_made_once_in_the_run_folder(tmp_path: Path) -> None:
    first, _ = resolve("tiny", tmp_path)
    assert first == tmp_path / "model"
    before = (first / "model.safetensors").read_bytes()
    again, _ = resolve("tiny", tmp_path, seed=5)
    assert (again / "model.safetensors").read_bytes() == before
    other = tmp_path / "other"
    other.mkdir()
    different, _ = resolve("tiny", other, seed=5)
    assert (different / "model.safetensors").read_bytes() != before


def test_a_model_that_is_half_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found, _ = resolve("tiny", tmp_path)
    assert max_context(found) == 256


def test_a_heavy_model_is_made_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    found, said = resolve("slow", tmp_path)
    assert found == tmp_path / "home" / "models" / "toy-slow"
    assert "once; kept in" in said[0]
    assert resolve("slow", tmp_path) == (found, [])


def test_a_model_that_cannot_be_made_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    with pytest.raises(RunError, match="there is no module nowhere"):
        resolve("m", tmp_path, recipe_with("nowhere:build", heavy=True))
    with pytest.raises(InvalidFieldError, match="there is no module nowhere"):
        resolve("m", tmp_path, recipe_with("nowhere:build", heavy=False))
    assert not (tmp_path / "model").exists()


def test_a_folder_is_checked(tmp_path: Path) -> None:
    made, _ = resolve("tiny", tmp_path)
    folder = tmp_path / "mine"
    shutil.copytree(made, folder)
    assert resolve(str(folder), tmp_path)[0] == folder
    for name, message in (
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("config.json", "has no config.json"),
    ):
        (folder / name).unlink()
        with pytest.raises(InvalidFieldError, match=message):
            resolve(str(folder), tmp_path)
    with pytest.raises(InvalidFieldError, match="no such folder; models of the recipe: tiny, slow"):
        resolve("/nowhere", tmp_path)


def test_the_longest_sequence_is_read_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 77}}')
    assert max_context(tmp_path) == 77
    (tmp_path / "config.json").write_text("{}")
    assert max_context(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidFieldError, match="cannot be read"):
        max_context(tmp_path)
