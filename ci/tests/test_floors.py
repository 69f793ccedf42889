from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


floors = load("floors")
pins = load("pins")


def workspace(root: Path, package: str, source: str, *, deps: str = "", inner: str = "mod.py") -> Path:
    """A workspace with one package `package` whose module `inner` holds `source`, beside a bare sibling set."""
    for name in ("miles-contracts", "miles-rollout", "miles-sync", "miles-loop", package):
        folder = root / "packages" / name
        module = folder / "src" / name.replace("-", "_")
        module.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\ndependencies = [{deps if name == package else ""}]\n'
        )
    path = root / "packages" / package / "src" / package.replace("-", "_") / inner
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return root


@pytest.mark.parametrize(
    ("package", "source", "deps", "inner", "message"),
    [
        ("miles-sync", "import miles_rollout\n", "", "mod.py", "floor 1 may only import floors below"),
        ("miles-sync", "def f():\n    from miles_loop.x import y\n", "", "mod.py", ":2: imports miles_loop"),
        ("miles-contracts", "import torch\n", '"torch"', "mod.py", "numpy and msgspec only"),
        ("miles-rollout", "import torch\n", '"torch"', "buffer.py", "outside engine/"),
        ("miles-sync", "import requests\n", "", "mod.py", "does not declare"),
        ("miles-sync", "", '"miles-contracts"', "mod.py", "needs a range"),
        ("miles-sync", "x = 1\n" * 801, "", "mod.py", "801 lines"),
    ],
)
def test_each_rule_catches_its_fault(
    tmp_path: Path, package: str, source: str, deps: str, inner: str, message: str
) -> None:
    faults = floors.check(workspace(tmp_path, package, source, deps=deps, inner=inner))
    assert len(faults) == 1
    assert message in faults[0]


@pytest.mark.parametrize(
    ("package", "source", "deps", "inner"),
    [
        ("miles-sync", "import os, miles_contracts\n", '"miles-contracts>=0.1,<0.2"', "mod.py"),
        ("miles-rollout", "import torch\n", '"torch>=2"', "engine/model.py"),
        ("miles-loop", "import miles_rollout, miles_sync\n", '"miles-rollout>=1,<2", "miles-sync>=1,<2"', "mod.py"),
        ("miles-sync", "from . import x\nfrom miles_sync import y\n", "", "mod.py"),
    ],
)
def test_what_is_allowed(tmp_path: Path, package: str, source: str, deps: str, inner: str) -> None:
    assert floors.check(workspace(tmp_path, package, source, deps=deps, inner=inner)) == []


LOCK = """
version = 1
[[package]]
name = "miles-x"
version = "0.1.0"
source = { editable = "packages/miles-x" }
[[package]]
name = "torch"
version = "2.13.0+cpu"
source = { registry = "somewhere" }
[[package]]
name = "numpy"
version = "2.4.6"
source = { registry = "elsewhere" }
"""


def test_pins_name_versions_and_no_hosts() -> None:
    assert pins.locked(LOCK) == ["numpy==2.4.6", "torch==2.13.0"]


def test_pins_are_replaced_in_place() -> None:
    before = '[tool.uv]\npackage = false\nconstraint-dependencies = ["a==1"]\n\n[tool.x]\ny = ["z"]\n'
    after = pins.written(before, ["b==2", "c==3"])
    assert pins.pinned(after) == ["b==2", "c==3"]
    assert after.replace(pins.written(before, ["a==1"]), "") != before
    assert pins.pinned(pins.written(after, ["a==1"])) == ["a==1"]


def test_readme_and_ci_use_the_same_test_command() -> None:
    command = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if "nox" in line and "pip install" in line
    )
    assert command.strip() in (ROOT / ".ci" / "run").read_text()
