"""Checks that imports only go down the floors, that every import is declared, and that files stay small.

Run as `python ci/floors.py [ROOT]`; prints one line a violation and exits 1 when there is any. The rules:

- a package imports only packages on lower floors, and recipes are imported by nobody;
- `miles-contracts` imports numpy and msgspec only (xxhash inside a function, for its `digest` extra);
- `miles-rollout` outside `engine/` imports neither torch nor transformers;
- every third-party import is declared by the package that makes it;
- a sibling is declared with a range that has both ends;
- no module is longer than 800 lines.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLOORS = {
    "miles_contracts": 0,
    "miles_rollout": 1,
    "miles_trainer": 1,
    "miles_sync": 1,
    "miles_lora": 2,
    "miles_distill": 2,
    "miles_diffusion": 2,
    "miles_loop": 3,
}
RECIPE_FLOOR = 4
MAX_LINES = 800
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "sglang_router": "sglang-router", "math_verify": "math-verify"}
"""Import names whose distribution is not simply the name with dashes."""


@dataclass(frozen=True)
class Package:
    """One distribution of the workspace."""

    module: str
    folder: Path
    floor: int
    declared: frozenset[str]
    siblings: tuple[str, ...]


def normalise(name: str) -> str:
    """Distribution name in the form that compares equal for `-`, `_` and `.` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def load_package(folder: Path) -> Package:
    """Read a package's metadata from its pyproject.toml."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    requirements = list(project.get("dependencies", []))
    for extra in project.get("optional-dependencies", {}).values():
        requirements += extra
    names = frozenset(normalise(re.split(r"[\s\[<>=!~;]", r, maxsplit=1)[0]) for r in requirements)
    siblings = tuple(r for r in project.get("dependencies", []) if r.startswith("miles-"))
    module = project["name"].replace("-", "_")
    floor = FLOORS.get(module, RECIPE_FLOOR) if folder.parent.name == "packages" else RECIPE_FLOOR
    return Package(module=module, folder=folder, floor=floor, declared=names, siblings=siblings)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute imports anywhere in a module: (dotted name, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def import_fault(package: Package, relative: Path, top: str, by_module: dict[str, Package]) -> str | None:
    """Why `top` may not be imported from the module at `relative` (inside the package), or None."""
    if top == package.module or top in sys.stdlib_module_names:
        return None
    other = by_module.get(top)
    if other is not None and other.floor >= package.floor:
        return f"imports {top}: floor {package.floor} may only import floors below it"
    if package.module == "miles_contracts" and top not in {"numpy", "msgspec", "xxhash"}:
        return f"imports {top}: miles-contracts needs numpy and msgspec only"
    heavy = top in {"torch", "transformers"}
    if package.module == "miles_rollout" and heavy and "engine" not in relative.parts:
        return f"imports {top}: miles-rollout outside engine/ needs no torch"
    if normalise(DISTRIBUTIONS.get(top, top)) not in package.declared:
        return f"imports {top}, which {package.folder.name}/pyproject.toml does not declare"
    return None


def check(root: Path) -> list[str]:
    """All violations below `root`, one line each."""
    folders = [p.parent for kind in ("packages", "recipes") for p in sorted(root.glob(f"{kind}/*/pyproject.toml"))]
    packages = [load_package(folder) for folder in folders]
    by_module = {p.module: p for p in packages}
    faults: list[str] = []
    for package in packages:
        open_ended = [r for r in package.siblings if ">=" not in r or "<" not in r.replace("<=", "")]
        manifest = f"{package.folder.name}/pyproject.toml"
        faults += [f"{manifest}: {r!r} needs a range like >=0.1,<0.2" for r in open_ended]
        source = package.folder / "src"
        for path in sorted(source.rglob("*.py")):
            text = path.read_text()
            lines = text.count("\n")
            where = path.relative_to(root)
            if lines > MAX_LINES:
                faults.append(f"{where}: {lines} lines; split it by concept (at most {MAX_LINES})")
            for name, line in imports(ast.parse(text)):
                fault = import_fault(package, path.relative_to(source), name.split(".")[0], by_module)
                if fault:
                    faults.append(f"{where}:{line}: {fault}")
    return faults


def main() -> int:
    """Print the violations; 1 when there is any."""
    faults = check(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    print("\n".join(faults) or "floors: every import goes down and is declared")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
