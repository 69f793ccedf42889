"""Keeps the exact versions of the whole environment in pyproject.toml, without naming any host.

`uv.lock` names the index it was resolved against and is therefore not committed. Instead the versions it
holds are written as `[tool.uv] constraint-dependencies`; the first `uv sync` makes an equal lock from them.

    python ci/pins.py write    copy the versions of uv.lock into pyproject.toml
    python ci/pins.py check    exit 1 when uv.lock holds a version that pyproject.toml does not pin
    python ci/pins.py list     print the pins as a constraints file for pip
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"constraint-dependencies = \[[^\]]*\]")


def locked(lock_text: str) -> list[str]:
    """`name==version` of every package of a lock that is not part of the workspace, sorted.

    A local version (torch's +cpu) is left out, so that the same pin admits the CUDA build of that version.
    """
    pins = []
    for package in tomllib.loads(lock_text)["package"]:
        source = package.get("source", {})
        if "version" in package and not {"editable", "virtual", "directory"} & source.keys():
            pins.append(f"{package['name']}=={package['version'].split('+')[0]}")
    return sorted(set(pins))


def pinned(pyproject_text: str) -> list[str]:
    """The pins of a pyproject.toml."""
    return list(tomllib.loads(pyproject_text)["tool"]["uv"]["constraint-dependencies"])


def written(pyproject_text: str, pins: list[str]) -> str:
    """`pyproject_text` with its pins replaced."""
    block = "constraint-dependencies = [\n" + "".join(f'  "{pin}",\n' for pin in pins) + "]"
    return BLOCK.sub(lambda _: block, pyproject_text, count=1)


def main(command: str) -> int:
    """Run one of the three commands."""
    pyproject = ROOT / "pyproject.toml"
    text = pyproject.read_text()
    if command == "list":
        print("\n".join(pinned(text)))
        return 0
    lock = ROOT / "uv.lock"
    if not lock.exists():
        print("uv.lock is missing: run `uv sync` first", file=sys.stderr)
        return 1
    pins = locked(lock.read_text())
    if command == "write":
        pyproject.write_text(written(text, pins))
        print(f"wrote {len(pins)} pins")
        return 0
    # Pins that the lock lacks are fine: torch's CPU build needs none of what its CUDA build needs.
    drift = sorted(set(pins) - set(pinned(text)))
    if drift:
        print("pins have drifted (refresh them with `nox -s pins`):\n  " + "\n  ".join(drift), file=sys.stderr)
    return 1 if drift else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in {"write", "check", "list"}:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
