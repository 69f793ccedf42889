"""Every `bash` block of the documentation works, page by page, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md"))
REASON = re.compile(r'(?:\b\w*RunError|super\(\).__init__)\(\s*"([a-z_]+)"')
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_commands_of_a_page(page: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "set -euo pipefail\n" + "\n".join(blocks(page))
    environment = {**os.environ, "PATH": path, "MILES_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{script}\n--- stdout\n{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-3000:]}"


def test_the_configuration_reference_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "ci/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert all(f" {Path(page).name}" in navigation for page in PAGES)


def test_every_reason_of_a_runs_end_is_explained() -> None:
    source = "\n".join(p.read_text("utf-8") for p in (ROOT / "packages/miles-loop/src").rglob("*.py"))
    reasons = {*REASON.findall(source), "driver_gone", "rollout_died", "invalid_field", "prompt_too_long", "non_finite"}
    assert {"process_died", "disk_full", "interrupted", "no_room", "engines_gone"} <= reasons
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in page] == []
