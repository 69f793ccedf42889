"""`--dry-run` says where everything would be, and what it would take of this machine, before anything is started."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from loop_toy.recipe import RECIPE, main
from safetensors.numpy import save_file

from miles_contracts import InvalidFieldError
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.config import RunConfig
from miles_loop.machine import TORCH_MIB, check_room
from miles_loop.placement import Machine, Row, placement, table
from miles_loop.sizes import ENGINE_MIB, TRAINER_MIB, ModelSize, engine_mib, model_size, size_of, trainer_mib

MIB = 2**20
BIG = ModelSize(parameters=1000 * MIB, itemsize=2.0, cached=1024, context=4096)
ROOMY = Machine(available_mib=10**6, cpus=64, disk_mib=10**6, shared_mib=10**6)


def config(*words: str) -> RunConfig:
    return config_for(RECIPE, parse(list(words), TRAIN_FLAGS))


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_a_run_of_this_machine() -> None:
    words = ["--trainer.ranks", "3", "--engine.replicas", "2", "--engine.port", "30000", "--engine.threads", "4"]
    rows = by_name(placement(config(*words, "--rollout.workers", "2"), None))
    assert list(rows) == ["driver", "trainer, trainer-1..2", "engine-0..1 (embedded)", "rollout-0..1"]
    assert [row.count for row in rows.values()] == [1, 3, 2, 2]
    assert rows["engine-0..1 (embedded)"].address == "127.0.0.1:30000-30001"
    assert rows["engine-0..1 (embedded)"].threads == 4
    assert all(row.where == "this machine" for row in rows.values())


def test_what_makes_the_answers_is_named(tmp_path: Path) -> None:
    agent = ["--task.agent", "loop_toy.agent:echo"]
    assert placement(config(), None)[0].name == "driver + answers + rewards"
    assert placement(config(*agent), None)[0].name == "driver + answers + rewards + session server"
    assert "rollout-0 + session servers" in by_name(placement(config(*agent, "--rollout.workers", "1"), None))


def test_bundles_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["--runtime", "ray", "--trainer.ranks", "2", "--engine.replicas", "3", "--runtime.ray.engine_gpus", "1"]
    rows = by_name(placement(config(*words), None))
    assert rows["trainer, trainer-1"].where == "Ray on this machine, bundles 0-1: 1 CPU, 1 GPU each"
    assert rows["engine-0..2 (embedded)"].where == "Ray on this machine, bundles 2-4: 1 CPU, 1 GPU each"
    assert rows["rollout-0"].where == "Ray on this machine, bundle 5: 1 CPU"
    joined = table(config(*words, "--address", "head:6379"), BIG, ROOMY)
    assert "Ray at head:6379, bundles 2-4" in joined
    assert "Ray places 6 bundles (pack)" in joined
    assert "memory: about 50 MiB" in joined, "what is on other nodes takes none of this machine's"
    running = ["--runtime", "ray", "--engine.urls", "http://a:1", "http://b:2"]
    rows = by_name(placement(config(*running), None))
    assert rows["engines that run already"].where == "not started here"
    assert rows["rollout-0"].where.endswith("bundle 1: 1 CPU")


def test_what_measures() -> None:
    dedicated = ["--evaluation.mode", "dedicated", "--evaluation.engines", "2"]
    (row,) = [r for r in placement(config(*dedicated), BIG) if r.name.startswith("evaluation")]
    assert (row.name, row.count, row.here) == ("evaluation-engine-0..1 (embedded)", 2, True)
    assert row.mib == engine_mib(config().engine, BIG)
    (row,) = [r for r in placement(config(*dedicated, "--evaluation.urls", "http://c:3"), BIG) if "evalu" in r.name]
    assert (row.address, row.here) == ("http://c:3", False)
    external = ["--evaluation.mode", "external", "--evaluation.command", "prog,{checkpoint}"]
    assert placement(config(*external), BIG)[-1].name == "evaluation: prog"


def test_memory_of_a_process() -> None:
    wide, narrow = config("--engine.dtype", "float32").engine, config("--engine.dtype", "bfloat16").engine
    assert engine_mib(wide, BIG) == ENGINE_MIB + 2 * 4000 + 2048, "old and new weights, and all of the cache"
    assert engine_mib(narrow, BIG) == ENGINE_MIB + 2 * 2000 + 2048
    short = config("--engine.max_context", "16", "--engine.max_batch", "4", "--engine.dtype", "bfloat16").engine
    assert engine_mib(short, BIG) == ENGINE_MIB + 4000 + 1, "64 slots of 2 KiB"
    assert trainer_mib(config(), BIG) == TRAINER_MIB + 18 * 1000
    assert trainer_mib(config("--trainer.objective.kl.coefficient", "0.1"), BIG) == TRAINER_MIB + 20 * 1000
    assert engine_mib(wide, None) is None
    assert trainer_mib(config(), None) is None
    gpu = config("--trainer.device", "cuda", "--rollout.engine", "sglang", "--engine.sglang.device", "cuda")
    assert [row.mib for row in placement(gpu, BIG)][1:] == [None, None]


def test_what_is_too_little_is_said() -> None:
    poor = Machine(available_mib=1000, cpus=1, disk_mib=100, shared_mib=64)
    said = table(config("--engine.threads", "2"), BIG, poor)
    assert said.count("THAT IS TOO LITTLE") == 3
    assert "3 besides the driver's, for 1 CPUs; they will take turns" in said
    assert "TOO LITTLE" not in table(config(), BIG, ROOMY)
    unknown = table(config(), None, Machine())
    assert "memory: not estimated: the model is not here yet" in unknown
    assert "disk" not in unknown


def test_a_folder_of_weights(tmp_path: Path) -> None:
    save_file({"a": np.zeros((4, 8), np.float16), "b": np.zeros(8, np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros(0, np.float32), "d": np.zeros((2, 2), np.float32)}, tmp_path / "model-2.safetensors")
    shape = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 4, "intermediate_size": 8}))
    found = model_size(tmp_path, 99)
    assert found == ModelSize(parameters=44, itemsize=(64 + 32 + 16) / 44, cached=3 * 2 * 4, context=99)
    (tmp_path / "config.json").write_text("{}")
    assert model_size(tmp_path) == ModelSize(parameters=44, itemsize=112 / 44, cached=None, context=None)
    (tmp_path / "model-2.safetensors").write_bytes(b"\xff" * 20)
    assert model_size(tmp_path) is None
    assert model_size(tmp_path / "nowhere") is None


def test_a_light_model_is_sized_and_a_heavy_one_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    size = size_of(RECIPE, config())
    assert size is not None
    assert size.parameters > 1000
    assert size.itemsize == 4
    assert size_of(RECIPE, config("--model", "slow")) is None
    assert list(tmp_path.iterdir()) == []
    assert size_of(RECIPE, config("--model", str(tmp_path))) is None


def test_the_table_stands_beside_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "--engine.replicas", "2"]) == 0
    shown = capsys.readouterr()
    assert tomllib.loads(shown.out)["engine"]["replicas"] == 2
    assert "engine-0..1 (embedded)" in shown.err
    assert "memory: about " in shown.err
    assert main(["train", "--dry-run", "--hardware", "h100"]) == 0
    assert "for another machine: a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_engines_that_measure_need_room_too() -> None:
    asked = config("--evaluation.mode", "dedicated", "--evaluation.engines", "50")
    with pytest.raises(InvalidFieldError, match="evaluation.engines: got 50"):
        check_room(asked, 20 * TORCH_MIB)
    check_room(asked, 20 * TORCH_MIB, training=False)
