"""Ports are kept from their choice to the end of the run; a server that finds its port taken moves."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from loop_toy.harness import alive

from miles_contracts import InvalidFieldError
from miles_loop.errors import ProcessDiedError
from miles_loop.hosts import LocalHost
from miles_loop.ports import Port, choose_ports
from miles_loop.processes import ProcessSpec
from miles_loop.serving import ServingChild, start_elsewhere, until_healthy
from miles_rollout.engine_client import EngineClient

HOST = "127.0.0.1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is only looked up")
SERVER = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"engine": "miles"}')


HTTPServer.allow_reuse_port = False
servers = [HTTPServer(("127.0.0.1", int(port)), Well) for port in sys.argv[1:]]
servers[0].serve_forever()
"""


def listener(port: int) -> socket.socket:
    """Somebody else's server at exactly this port."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((HOST, port))
    made.listen()
    return made


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port(HOST)
    yield made
    made.close()


def test_ports_are_free_ones_or_those_that_were_asked_for() -> None:
    free = choose_ports(HOST, 0, 3)
    numbers = [port.number for port in free]
    assert len(set(numbers)) == 3
    assert [port.url for port in free] == [f"http://127.0.0.1:{n}" for n in numbers]
    for port in free:
        port.close()
    (asked,) = choose_ports(HOST, numbers[0], 1)
    assert (asked.number, asked.wanted, free[0].wanted) == (numbers[0], True, False)
    asked.close()
    with socket.create_server((HOST, 0)) as server:
        with pytest.raises(InvalidFieldError, match=r"engine\.port"):
            choose_ports(HOST, server.getsockname()[1], 1)
    with pytest.raises(InvalidFieldError, match=r"engine\.host"):
        choose_ports("192.0.2.1", 0, 1)


def test_a_refused_choice_keeps_nothing() -> None:
    with pytest.raises(InvalidFieldError, match="65536"):
        choose_ports(HOST, 65535, 2)
    with socket.socket() as plain:
        plain.bind((HOST, 65535))


@linux
def test_nobody_who_looks_for_a_free_port_is_given_a_kept_one(port: Port) -> None:
    with socket.socket() as plain, pytest.raises(OSError, match="Address already in use"):
        plain.bind((HOST, port.number))
    found = []
    for index in range(200):
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, index % 2)
        other.bind((HOST, 0))
        found.append(other)
    assert port.number not in {other.getsockname()[1] for other in found}
    for other in found:
        other.close()


@linux
def test_its_server_binds_it_and_a_dead_server_refuses(port: Port) -> None:
    assert not port.taken()
    with listener(port.number), socket.create_connection((HOST, port.number)):
        assert port.taken()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port.number))
    assert not port.taken()


def test_another_one_is_free_and_the_first_let_go(port: Port) -> None:
    other = port.another()
    assert other.number != port.number
    with socket.socket() as plain:
        plain.bind((HOST, port.number))
    other.close()
    other.close()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], ProcessSpec]:
    """Serves at all ports that it is given."""
    (tmp_path / "serves.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda ports: ProcessSpec(name="server", module="serves", arguments=tuple(map(str, ports)))


async def test_a_port_stolen_before_the_start_moves_the_server(make, tmp_path: Path) -> None:
    child = ServingChild(make, tmp_path / "log", choose_ports(HOST, 0, 2))
    first = child.url
    client, events = EngineClient(first), list[str]()
    with listener(int(first.rpartition(":")[2])):
        await child.start()
        await asyncio.wait_for(until_healthy(client, child, events.append), 60)
        assert client.address == child.url != first
        assert client.url == first, "routers and records know it under its first name"
    await client.close()
    await child.stop(5)


async def test_a_port_stolen_between_start_and_bind_moves_the_server(make, tmp_path: Path) -> None:
    """The child is under way when the thief comes; what it serves besides may move as well."""
    ports = choose_ports(HOST, 0, 2)
    child = ServingChild(make, tmp_path / "log", ports)
    first = child.url
    client, events = EngineClient(first), list[str]()
    await child.start()
    with listener(ports[1].number):
        await asyncio.wait_for(until_healthy(client, child, events.append), 60)
        pid = child.pid
        assert child.url == first == client.address, "the port that nobody stole is kept"
    assert len(events) == 1
    assert "another program listens on its port" in events[0]
    assert "ended with status 1" in events[0]
    await client.close()
    await child.stop(5)
    assert not alive(pid)


async def test_a_restarted_server_is_where_it_was(make, tmp_path: Path) -> None:
    child = ServingChild(make, tmp_path / "log", choose_ports(HOST, 0, 1))
    client, events = EngineClient(child.url), list[str]()
    await child.start()
    await asyncio.wait_for(until_healthy(client, child, events.append), 60)
    assert not await child.displaced(), "it is its own server that listens"
    child.crash("for the test")
    await child.died()
    assert not await child.displaced()
    await child.start()
    await asyncio.wait_for(until_healthy(client, child, events.append), 60)
    assert (client.address, events) == (client.url, [])
    await client.close()
    await child.stop(5)


async def test_a_death_for_another_reason_is_told(make, tmp_path: Path) -> None:
    child = ServingChild(lambda ports: ProcessSpec(name="x", module="no_such_module"), tmp_path / "log", [Port(HOST)])
    client = EngineClient(child.url)
    await child.start()
    with pytest.raises(ProcessDiedError, match="no_such_module"):
        await until_healthy(client, child, print)
    with pytest.raises(ProcessDiedError, match="no_such_module"):
        await start_elsewhere(child, print)
    await child.stop(5)


@pytest.mark.parametrize(("asked", "moves"), [(True, True), (False, False)])
async def test_one_that_has_to_stay_fails_with_its_own_words(make, tmp_path: Path, asked: bool, moves: bool) -> None:
    """A port that was asked for by number, or a router that knows engines by their first addresses."""
    number = 0
    if asked:
        free = Port(HOST)
        number = free.number
        free.close()
    host = LocalHost(tmp_path, HOST, number, moves=moves)
    await host.open(engines=1, trainer=False)
    (engine,) = await host.make_engines(lambda index, address, port: make([port]))
    client = EngineClient(engine.url)
    with listener(int(engine.url.rpartition(":")[2])):
        await engine.process.start()
        await engine.process.died()
        assert not await engine.process.displaced()
        with pytest.raises(ProcessDiedError, match="Address already in use"):
            await start_elsewhere(engine.process, print)
    await client.close()
    await engine.process.stop(5)
