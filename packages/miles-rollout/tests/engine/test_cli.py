"""The process: one line when it is ready, clear errors when it cannot be, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_rollout.engine.cli import READY, bind, parse_config

COMMAND = [sys.executable, "-m", "miles_rollout.engine"]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [*COMMAND, "--model-path", str(folder), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_serves_until_told_to_stop(models) -> None:
    process = start(models("qwen3"), "--weight-version", "5")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY), process.stderr.read() if process.stderr else ""
        url = line.removeprefix(READY).split()[0]
        import urllib.request

        with urllib.request.urlopen(url + "/get_weight_version") as answer:
            assert b'"5"' in answer.read()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=20)
        assert rest == ""
        assert process.returncode == 0
    finally:
        process.kill()


def test_ends_with_its_parent(models) -> None:
    """The parent starts an engine, says its id and is killed at once."""
    command = [*COMMAND, "--model-path", str(models("qwen3")), "--port", "0", "--end-with-parent"]
    program = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({command!r}, stdout=subprocess.PIPE, text=True)\n"
        "print(p.stdout.readline().strip(), p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = int(parent.stdout.readline().split()[-1])
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 20
    while alive(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(engine)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie waiting for its reaper does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text("x"), "is a file"),
        (lambda p: p.mkdir(), "no config.json"),
        (lambda p: (p.mkdir(), (p / "config.json").write_text("{")), "cannot be read"),
        (lambda p: (p.mkdir(), (p / "config.json").write_text("{}")), "has no weights"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, capsys, prepare, reason: str) -> None:
    from miles_rollout.engine.cli import main

    folder = tmp_path / "model"
    prepare(folder)
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert str(folder) in error


def test_a_taken_port(models, capsys) -> None:
    from miles_rollout.engine.cli import main

    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--model-path", str(models("qwen3")), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert "port" in error


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "float8"], "--dtype"),
        (["--context-length", "x"], "--context-length"),
        (["--no-such-option", "1"], "--no-such-option"),
    ],
)
def test_wrong_options(options: list[str], named: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(["--model-path", "m", *options])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("miles-engine: ")
    assert named in told
    assert told.count("\n") == 1


def test_a_context_longer_than_the_models(models) -> None:
    from miles_contracts import InvalidFieldError
    from miles_rollout.engine.cli import build

    config = parse_config(["--model-path", str(models("qwen3")), "--context-length", "100000"])
    with pytest.raises(InvalidFieldError, match="context_length.*made for 256"):
        build(config)


def test_weight_files_that_are_broken_or_incomplete(models, tmp_path: Path, capsys) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from miles_rollout.engine.cli import main

    folder = tmp_path / "model"
    shutil.copytree(models("qwen3"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    assert "lack 1 tensors: model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:1000])
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "cannot be loaded" in error
    assert str(folder) in error
