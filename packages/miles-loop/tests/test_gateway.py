"""SGLang's router as a process of a run: what is refused before anything starts, and what is started."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from loop_toy.recipe import RECIPE

from miles_contracts import DeadlineExceededError, InvalidFieldError
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.config import RunConfig
from miles_loop.errors import ProcessDiedError
from miles_loop.gateway import Gateway, gateway_spec, require_router
from miles_loop.ports import choose_ports
from miles_loop.processes import ProcessSpec
from miles_loop.serving import ServingChild
from miles_rollout.engine_client import Deadlines
from miles_rollout.router import gateway


def config(*words: str) -> RunConfig:
    return config_for(RECIPE, parse(words, TRAIN_FLAGS))


def test_the_own_router_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "SUPPORTED", ((9,), (10,)))
    require_router(config(), routing=True)


def test_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "SUPPORTED", ((9,), (10,)))
    with pytest.raises(InvalidFieldError, match="sglang-router>=9,<10"):
        require_router(config("--engine.router", "sglang"), routing=False)


@pytest.mark.parametrize(
    ("words", "routing", "says"),
    [
        ((), True, "drops expert choices; use own, or switch trainer.replay.enabled off"),
        (("--runtime", "ray"), False, "engines on Ray change their addresses"),
    ],
)
def test_what_cannot_go_through_is_refused(words: tuple[str, ...], routing: bool, says: str) -> None:
    pytest.importorskip("sglang_router")
    with pytest.raises(InvalidFieldError, match=says) as caught:
        require_router(config("--engine.router", "sglang", *words), routing=routing)
    assert caught.value.field == "engine.router"


def test_the_process_listens_where_it_is_told() -> None:
    spec = gateway_spec("127.0.0.1", 31000, 31001)
    assert spec.module == "sglang_router.launch_router"
    told = dict(zip(spec.arguments, spec.arguments[1:], strict=False))
    assert (told["--host"], told["--port"], told["--prometheus-port"]) == ("127.0.0.1", "31000", "31001")
    assert told["--policy"] == "manual"


def made(tmp_path: Path, module: str, events: list[str], **options: Any) -> Gateway:
    process = ServingChild(
        lambda ports: ProcessSpec(name="router", module=module, arguments=(str(ports[0]),)),
        tmp_path / "router.log",
        choose_ports("127.0.0.1", 0, 1),
    )
    values: dict[str, Any] = {"start_timeout_s": 60.0, "restarts": 1} | options
    return Gateway(process, deadlines=Deadlines(), on_event=events.append, **values)


async def test_one_that_does_not_start_is_named_and_given_up(tmp_path: Path) -> None:
    events: list[str] = []
    front = made(tmp_path, "no_such_module", events)
    await front.process.start()
    with pytest.raises(ProcessDiedError, match="No module named no_such_module"):
        await front.wait_ready()
    death = await asyncio.wait_for(front.watch(), 60)
    assert isinstance(death, ProcessDiedError)
    assert "starting it again" in events[0]
    assert "could not be brought back" in events[1]
    await front.close(1.0)


async def test_one_that_does_not_answer_is_named(tmp_path: Path) -> None:
    front = made(tmp_path, "http.server", [], start_timeout_s=0.3)
    with pytest.raises(DeadlineExceededError, match=r"sglang-router.*router\.log"):
        await asyncio.gather(front.process.start(), front.wait_ready())
    await front.close(1.0)


async def test_the_real_one_starts_again_elsewhere_when_a_port_is_taken_meanwhile(tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    ports, events = choose_ports("127.0.0.1", 0, 2), list[str]()
    process = ServingChild(lambda numbers: gateway_spec("127.0.0.1", *numbers), tmp_path / "router.log", ports)
    front = Gateway(process, deadlines=Deadlines(), on_event=events.append, start_timeout_s=60.0, restarts=0)
    await process.start()
    pid = process.pid
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", ports[1].number))
        thief.listen()
        await front.wait_ready()
        assert process.running
        assert process.pid != pid
    assert any("another program listens on its port" in event for event in events)
    await front.close(5.0)
