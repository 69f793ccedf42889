"""`miles-session`: what is wrong with a command line is one line that names option, value and remedy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_rollout.session.cli import config_of, main, make_parser, serve
from miles_rollout.session.matching import ALL_REPAIRS, Repair

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--repairs", "foo"], "--repairs: got 'foo'; use all, none, or a comma list of "),
        (["--max-sessions", "-1"], "--max-sessions: got -1; must be greater than or equal to 1"),
        (["--engine-timeout", "0"], "--engine-timeout: got 0.0; must be greater than 0"),
        (["--matcher", "nope"], "--matcher: got 'nope'; use one of strict, "),
        (["--port", "99999"], "--port: got 99999; use a number from 0 to 65535"),
        (["--token-file", "nowhere"], "--token-file: got 'nowhere'; cannot be read: No such file"),
        (["--host", "0.0.0.0"], "--host: got '0.0.0.0'; an address that others can reach needs a token"),
        (["--record-routing"], "--num-experts: got None; recording routing needs"),
        ([], f"--engine: got '{NOWHERE}'; no engine answers there; start it first"),
        (["--engine", "localhost:30000"], "--engine: got 'localhost:30000'; give a URL like http://"),
    ],
)
def test_a_wrong_value(model_dir: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", NOWHERE, "--model", str(model_dir), "--port", "0", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"miles-session: {says}")
    assert told.count("\n") == 1


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", NOWHERE, "--model", "nosuch"]) == 2
    assert capsys.readouterr().err == "miles-session: --model: got 'nosuch'; must be a folder with a tokenizer.json\n"


@pytest.mark.parametrize("words", [["--engine", NOWHERE], ["--prot", "1"], ["--port", "abc"], ["--family", "nosuch"]])
def test_a_wrong_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("miles-session: ")
    assert told.endswith("; see miles-session --help\n")
    assert told.count("\n") == 1


async def test_a_taken_port(model_dir: Path, taken: int) -> None:
    app = web.Application()

    async def good(request: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_get("/{any:.*}", good)
    async with TestServer(app) as engine:
        words = ["--engine", str(engine.make_url("")), "--model", str(model_dir), "--port", str(taken)]
        options = make_parser().parse_args(words)
        with pytest.raises(ValueError, match=rf"--port: got {taken}; cannot listen on .*in use; choose another, or 0"):
            await serve(options, config_of(options), None)
        options.port, options.host = 0, "no-such-host.invalid"
        with pytest.raises(ValueError, match=r"--host: got 'no-such-host.invalid'; cannot listen on"):
            await serve(options, config_of(options), "secret")


def test_kinds_of_repairs() -> None:
    found = {}
    for text in ("all", "none", str(next(iter(Repair)))):
        found[text] = config_of(
            make_parser().parse_args(["--engine", NOWHERE, "--model", "m", "--repairs", text])
        ).repairs
    assert list(found.values()) == [ALL_REPAIRS, frozenset(), {next(iter(Repair))}]
