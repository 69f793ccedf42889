"""SGLang as a run's engine: its process is data, and models that it would serve wrongly are refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_toy.recipe import RECIPE, main

from miles_contracts import EngineUnavailableError, InvalidFieldError
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.config import EngineConfig, RunConfig, TransportKind
from miles_loop.runtime import engine_spec, require_runtime
from miles_loop.sglang_engine import require_sglang
from miles_loop.transports import BroadcastTransport, NotConnectedError
from miles_rollout.engine_identity import EngineIdentity, EngineKind
from miles_rollout.sglang_launch import SglangOptions


@pytest.fixture
def model(tmp_path: Path):
    """`model(**fields)`: a folder with this config.json."""

    def write(**fields: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write


def settings(**fields: Any) -> EngineConfig:
    return EngineConfig(kind=EngineKind.SGLANG, **fields)


def test_a_process_of_sglang(model) -> None:
    options = SglangOptions(device="cpu", attention_backend="torch_native")
    config = settings(
        python="/opt/sglang/bin/python",
        environment={"A": "b"},
        threads=2,
        max_context=512,
        extra_args=("--enable-metrics",),
        sglang=options,
    )
    folder = model(num_hidden_layers=2)
    spec = engine_spec(config, 1, 30001, folder)
    assert (spec.name, spec.module, spec.python, spec.threads) == (
        "engine-1",
        "sglang.launch_server",
        "/opt/sglang/bin/python",
        2,
    )
    assert spec.environment == {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "A": "b"}
    assert " ".join(spec.arguments) == (
        f"--model-path {folder} --host 127.0.0.1 --port 30001 --device cpu --attention-backend torch_native "
        "--dtype float32 --context-length 512 --max-running-requests 256 --weight-version 0 --skip-server-warmup "
        "--enable-metrics"
    )


def test_a_mixture_always_records_its_experts(model) -> None:
    folder = model(num_experts=8, tie_word_embeddings=False)
    assert "--enable-return-routed-experts" in engine_spec(settings(), 0, 1, folder).arguments
    assert "--enable-return-routed-experts" not in engine_spec(settings(), 0, 1, model()).arguments


def test_a_mixture_with_tied_embeddings_is_refused(model) -> None:
    with pytest.raises(
        InvalidFieldError, match=r"tied embeddings; use one with an lm_head, or --rollout\.engine embedded"
    ):
        engine_spec(settings(), 0, 1, model(num_experts=8, tie_word_embeddings=True))
    engine_spec(settings(), 0, 1, model(tie_word_embeddings=True))
    engine_spec(EngineConfig(), 0, 1, model(num_experts=8, tie_word_embeddings=True))


def test_the_embedded_engine_may_have_an_environment_of_its_own_too(model) -> None:
    spec = engine_spec(EngineConfig(python="/p", environment={"A": "b"}), 0, 1, model())
    assert (spec.module, spec.python, spec.environment) == ("miles_rollout.engine", "/p", {"A": "b"})


def config(*argv: str) -> RunConfig:
    return config_for(RECIPE, parse(argv, TRAIN_FLAGS))


def test_weights_reach_sglang_by_broadcast_unless_told_otherwise(tmp_path: Path) -> None:
    assert config().sync.transport is TransportKind.LOCAL
    assert config("--rollout.engine", "sglang").sync.transport is TransportKind.BROADCAST
    assert config("--rollout.engine", "sglang", "--sync.transport", "disk").sync.transport is TransportKind.DISK
    file = tmp_path / "run.toml"
    file.write_text('[engine]\nkind = "sglang"\n')
    assert config("--config", str(file)).sync.transport is TransportKind.BROADCAST
    file.write_text('[sync]\ntransport = "disk"\n')
    assert config("--config", str(file), "--rollout.engine", "sglang").sync.transport is TransportKind.DISK


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"engine\.kind.*vllm.*embedded \| sglang"):
        config("--rollout.engine", "vllm")
    with pytest.raises(InvalidFieldError, match=r"engine\.sglang\.tensor_parallel"):
        config("--rollout.engine", "sglang", "--engine.sglang.tensor_paralel", "2")
    with pytest.raises(InvalidFieldError, match="must divide tensor_parallel 4"):
        config("--engine.sglang.tensor_parallel", "4", "--engine.sglang.expert_parallel", "3")


async def test_an_sglang_that_dies_before_an_update_costs_itself_not_the_run() -> None:
    class Gone:
        url = "http://gone"

        async def identify(self) -> EngineIdentity:
            return EngineIdentity(kind=EngineKind.SGLANG, version="0.5.23")

        async def server_info(self) -> dict[str, Any]:
            raise EngineUnavailableError(self.url, "connection refused")

    transport = BroadcastTransport(sender=None, flush=True)  # type: ignore[arg-type]
    with pytest.raises(NotConnectedError, match="connection refused") as caught:
        await transport.connect([Gone()])  # type: ignore[list-item]
    assert caught.value.engine == "http://gone"


@pytest.fixture
def interpreter(tmp_path: Path):
    """`interpreter(status)`: a program in an interpreter's place that ends with this status."""

    def write(status: int) -> str:
        path = tmp_path / f"python{status}"
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return write


def sglang_run(python: str, *options: str) -> RunConfig:
    words = ("--rollout.engine", "sglang", "--engine.python", python, *options)
    return config_for(RECIPE, parse(words, TRAIN_FLAGS))


def test_an_interpreter_without_sglang_is_refused_before_anything_starts(
    interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("train", "--rollout.engine", "sglang", "--engine.python")
    assert main([*options, "/no/such/python"]) == 2
    assert "engine.python: got '/no/such/python'; cannot be run: No such file" in capsys.readouterr().err
    python = interpreter(3)
    assert main([*options, python]) == 2
    assert f"engine.python: got '{python}'; SGLang is not installed there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [Path(python)]


def test_this_interpreter_is_asked_with_the_engines_environment(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    require_sglang(settings(environment={"PYTHONPATH": str(tmp_path)}))
    if importlib.util.find_spec("sglang") is None:
        with pytest.raises(InvalidFieldError, match=f"engine.python: got '{sys.executable}'; SGLang is not installed"):
            require_sglang(settings())


def test_sglang_is_not_asked_for_where_it_is_not_started(interpreter) -> None:
    python = interpreter(3)
    require_runtime(sglang_run(python, "--engine.urls", "http://a:1"))
    with pytest.raises(InvalidFieldError, match=r"engine\.python"):
        require_runtime(sglang_run(python))
    require_runtime(sglang_run(interpreter(1)))  # it failed in another way: its start will say how
