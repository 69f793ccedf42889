"""What cannot work on a cluster is refused by name, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray_cluster import TwoNodes, gone
from recipe_runs import SMALL, Shell

from miles_contracts import InvalidFieldError
from miles_loop.arguments import config_for, parse
from miles_loop.ray_runtime.host import RayHost
from miles_loop.ray_runtime.supervisor import Place
from miles_loop.ray_runtime.visibility import require_shared_memory, require_visible
from miles_loop.run_folder import RunFolder
from miles_qwen3.recipe import RECIPE

pytestmark = pytest.mark.ray


def refused(shell: Shell, *options: object, status: int = 2) -> str:
    """What `train` says before it ends."""
    return shell.run("miles-qwen3", "train", "--steps", 1, *options, *SMALL, status=status)


def test_addresses_that_cannot_be_joined(shell: Shell) -> None:
    ray = ("--runtime", "ray", "--address")
    assert "no Ray cluster can be joined there" in refused(shell, *ray, "127.0.0.1:1")
    assert "ray job submit" in refused(shell, *ray, "ray://127.0.0.1:10001")
    assert "use host:port, or auto" in refused(shell, *ray, "somewhere")


def test_addresses_of_engines_are_not_for_the_user_to_choose(cluster: TwoNodes, shell: Shell) -> None:
    assert "engine.host" in refused(shell, *cluster.options, "--engine.host", "10.0.0.1")
    assert "engine.port" in refused(shell, *cluster.options, "--engine.port", 30000)


def test_a_router_that_cannot_follow_engines_is_refused(tmp_path: Path) -> None:
    config = config_for(RECIPE, parse(["--runtime", "ray", "--engine.router", "sglang"], ()))
    with pytest.raises(InvalidFieldError, match="they may move"):
        RayHost(config, RunFolder(tmp_path), tmp_path, print)


def test_a_cluster_without_room_ends_the_run_by_name(cluster: TwoNodes, shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--runtime.ray.engine_gpus", 1, "--runtime.ray.trainer_gpus", 0, "--run-dir", run)
    options += ("--runtime.ray.placement_timeout_s", 1)
    said = refused(shell, *cluster.options, *options, status=1)
    assert "no node has 1 CPU, 1 GPU for engine-0" in said
    assert json.loads((run / "status.json").read_text())["reason"] == "no_room"
    assert gone(run)


class Node:
    """The supervisor on a machine with folders of its own."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self.missing, self.leave_mark, self.remove_mark = (
            SimpleNamespace(remote=work) for work in (self._missing, self._leave_mark, self._remove_mark)
        )

    def _sees(self, path: str) -> bool:
        return Path(path).exists() and any(Path(path).is_relative_to(folder) for folder in self._folders)

    async def _missing(self, paths: list[str]) -> list[str]:
        return [path for path in paths if not self._sees(path)]

    async def _leave_mark(self, path: str) -> None:
        Path(path).touch()  # noqa: ASYNC240 - a test

    async def _remove_mark(self, path: str) -> None:
        Path(path).unlink()  # noqa: ASYNC240 - a test


async def test_an_engine_that_does_not_see_the_trainers_memory_is_refused(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    here, there = Place("a", "10.0.0.1", "one", 1), Place("b", "10.0.0.2", "two", 1)
    trainer = (Node(memory), here)
    await require_shared_memory(trainer, (Node(memory), here), memory)
    with pytest.raises(InvalidFieldError, match=r"sync\.transport.*an engine is on two.*the trainer on one"):
        await require_shared_memory(trainer, (Node(), there), memory)
    assert not list(memory.iterdir()), "no mark is left"


async def test_a_node_that_does_not_see_the_run_folder_is_refused(tmp_path: Path) -> None:
    place = Place("a", "10.0.0.1", "one", 1)
    paths = {"model": tmp_path / "model", "run_dir": tmp_path / "run"}
    for path in paths.values():
        path.mkdir()
    await require_visible(Node(tmp_path), place, paths)
    with pytest.raises(InvalidFieldError, match="run_dir.*one .* does not see it"):
        await require_visible(Node(tmp_path / "model"), place, paths)
