"""How each target's engines are started, as the command line that a user could type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.runtime import engine_spec
from miles_qwen3 import RECIPE
from miles_qwen3.hardware import TARGETS

COMMON = "--dtype bfloat16 --max-running-requests 256 --weight-version 0 --skip-server-warmup"
LINES = {
    "h100-0.6b": "--mem-fraction-static 0.8 --attention-backend fa3",
    "h100-4b": "--mem-fraction-static 0.8 --attention-backend fa3",
    "h100-8b": "--mem-fraction-static 0.8 --attention-backend fa3",
    "h100-32b": "--tp-size 4 --mem-fraction-static 0.8 --attention-backend fa3",
    "h100-30b-a3b": "--tp-size 8 --ep-size 8 --mem-fraction-static 0.8 --enable-return-routed-experts",
    "a100-8b": "--mem-fraction-static 0.75 --attention-backend flashinfer",
    "b200-30b-a3b": "--tp-size 4 --ep-size 4 --mem-fraction-static 0.85 --enable-return-routed-experts",
}
CPU = (
    "--mem-fraction-static 0.1 --device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--max-total-tokens 20000 --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled "
    "--disable-overlap-schedule --sleep-on-idle --dtype float32 --max-running-requests 256 --weight-version 0 "
    "--skip-server-warmup"
)


def command_line(folder: Path, *argv: str) -> str:
    """What starts the first engine, after model and address."""
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    config = config_for(RECIPE, parse(argv, TRAIN_FLAGS))
    spec = engine_spec(config.engine, 0, 30000, folder)
    assert spec.module == "sglang.launch_server"
    return " ".join(spec.arguments).removeprefix(f"--model-path {folder} --host 127.0.0.1 --port 30000 ")


@pytest.mark.parametrize("name", [t.name for t in TARGETS if t.name != "cpu"])
def test_gpu_targets_start_sglang(name: str, tmp_path: Path) -> None:
    assert command_line(tmp_path, "--hardware", name) == f"{LINES[name]} {COMMON}"


def test_the_cpu_can_start_it_too(tmp_path: Path) -> None:
    assert command_line(tmp_path, "--hardware", "cpu", "--rollout.engine", "sglang") == CPU
