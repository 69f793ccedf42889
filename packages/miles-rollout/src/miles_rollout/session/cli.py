"""`miles-session`: serve sessions in front of a running engine, or verify a model's chat renderer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from miles_contracts import Engine, EngineError, InvalidFieldError, MilesError
from miles_rollout.command_line import OneLineParser, first_problem, print_problem
from miles_rollout.engine_client import Deadlines, EngineClient
from miles_rollout.renderers import FAMILIES, load_renderer
from miles_rollout.router import Router
from miles_rollout.session.config import SessionConfig
from miles_rollout.session.context import ContextWindow
from miles_rollout.session.matching import ALL_REPAIRS, Repair
from miles_rollout.session.server import SessionServer
from miles_rollout.session.tree import Policy

_TOKEN_VARIABLE = "MILES_SESSION_TOKEN"
_OPTIONS = {
    "model_path": "--model",
    "EngineClient.url": "--engine",
    "engine_timeout_s": "--engine-timeout",
    "idle_timeout_s": "--idle-timeout",
    "token": "--token-file",
}
"""Options whose fields have another name."""
_EPILOG = """\
An agent opens a session and then speaks the OpenAI chat API to it:

  miles-session --engine http://127.0.0.1:30000 --model ./Qwen3-0.6B --port 8900
  curl -X POST http://127.0.0.1:8900/sessions
      -> {"session_id": "kJ3...", "policy": "linear", "base_url": "/sessions/kJ3.../v1"}
  OpenAI(base_url="http://127.0.0.1:8900/sessions/kJ3.../v1", api_key="none").chat.completions.create(...)
  curl http://127.0.0.1:8900/sessions/kJ3.../trajectories -o turns.mls1      # ids, log-probs, masks, versions

The engine is asked for token ids and never sees text; what it sampled is stored and never tokenised again.
Is the chat renderer of your model exact? Find out without an engine:

  miles-session verify --model ./Qwen3-0.6B
"""


def make_parser() -> OneLineParser:
    """The command line of the server."""
    defaults = SessionConfig()
    parser = OneLineParser(
        prog="miles-session",
        description="Serve OpenAI-style chat sessions in front of an engine (SGLang, or miles-engine), keeping the "
        "exact tokens for training. `miles-session verify` proves a model's chat renderer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engine", action="append", required=True, metavar="URL", help="engine to sample from; repeat for several")
    add("--model", type=Path, required=True, metavar="DIR", help="model folder; only tokenizer and template are read")
    add("--family", choices=sorted(FAMILIES), help="renderer family (default: found from the folder)")
    add("--host", default="127.0.0.1", help="address to listen on; another than loopback needs a token")
    add("--port", type=int, default=8900, help="port to listen on, 0 for any free one (default %(default)s)")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the bearer token that clients must send (or set {_TOKEN_VARIABLE})",
    )
    add("--insecure", action="store_true", help="listen on any address without a token")
    add(
        "--policy",
        type=Policy,
        choices=list(Policy),
        default=defaults.policy,
        help="linear: a session is one growing conversation; branching: histories may be edited or compacted, one "
        "trajectory per leaf (default %(default)s; a session may choose when it is opened)",
    )
    add(
        "--matcher",
        default=defaults.matcher,
        metavar="NAME",
        help="when a replayed message counts as the stored one: strict, loose_tool_call, role_content_only (risky), "
        "or package.module:function (default %(default)s)",
    )
    add(
        "--repairs",
        default="all",
        metavar="KINDS",
        help=f"what to overlook in a harness's copy of the policy's own messages: all, none, or a comma list of "
        f"{', '.join(Repair)} (default all; every repair is counted)",
    )
    add("--thinking", choices=("on", "off"), help="switch the family's reasoning (default: the family's)")
    add("--wait-when-busy", action="store_true", help="queue a second request of a linear session instead of 409")
    add(
        "--best-effort-tool-choice",
        action="store_true",
        help="serve a forced tool choice as 'auto' where a call cannot be opened exactly, instead of refusing it",
    )
    add("--no-live-streams", action="store_true", help="stream finished turns only, not what the engine just samples")
    add("--record-routing", action="store_true", help="record expert choices (needs --num-experts)")
    add("--num-experts", type=int, help="experts a layer of a mixture-of-experts model")
    add("--routing-layers", type=int, help="layers in SGLang's routing answers (its decoder layers)")
    add("--default-max-tokens", type=int, default=defaults.default_max_tokens, help="budget of a turn that names none")
    add("--max-context-tokens", type=int, help="longest prompt plus completion (default: the engines')")
    add("--engine-timeout", type=float, default=defaults.engine_timeout_s, metavar="S", help="longest generation")
    add("--max-sessions", type=int, default=defaults.max_sessions, help="sessions open at a time")
    add("--max-nodes", type=int, default=defaults.max_nodes, help="turns a session may hold")
    add("--max-body-bytes", type=int, default=defaults.max_body_bytes, help="largest request body")
    add("--idle-timeout", type=float, default=defaults.idle_timeout_s, metavar="S", help="life of an unused session")
    return parser


def _kinds(text: str) -> frozenset[Repair]:
    return frozenset(Repair(kind.strip()) for kind in text.split(","))


def config_of(options: argparse.Namespace) -> SessionConfig:
    """The configuration that command-line options name.

    Raises:
        ValidationError: a value out of range.
        InvalidFieldError: an unknown kind of repair.
    """
    kinds = {"all": ALL_REPAIRS, "none": frozenset[Repair]()}
    try:
        repairs = kinds[options.repairs] if options.repairs in kinds else _kinds(options.repairs)
    except ValueError:
        remedy = f"use all, none, or a comma list of {', '.join(Repair)}"
        raise InvalidFieldError("--repairs", options.repairs, remedy) from None
    return SessionConfig(
        policy=options.policy,
        matcher=options.matcher,
        repairs=repairs,
        wait_when_busy=options.wait_when_busy,
        best_effort_tool_choice=options.best_effort_tool_choice,
        live_streams=not options.no_live_streams,
        record_routing=options.record_routing,
        num_experts=options.num_experts,
        default_max_tokens=options.default_max_tokens,
        max_context_tokens=options.max_context_tokens,
        engine_timeout_s=options.engine_timeout,
        max_sessions=options.max_sessions,
        max_nodes=options.max_nodes,
        max_body_bytes=options.max_body_bytes,
        idle_timeout_s=options.idle_timeout,
    )


async def serve(options: argparse.Namespace, config: SessionConfig, token: str | None) -> None:
    """Serve until SIGINT or SIGTERM."""
    renderer = load_renderer(options.model, options.family)
    if options.thinking is not None:
        renderer = renderer.with_options(thinking=options.thinking == "on")
    deadlines = Deadlines(generate=config.engine_timeout_s)
    clients = [EngineClient(url, deadlines=deadlines, routing_layers=options.routing_layers) for url in options.engine]
    router = Router(clients)
    server = SessionServer(
        router,
        renderer,
        config,
        host=options.host,
        port=options.port,
        token=token,
        insecure=options.insecure,
        model=options.model.name,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        for client in clients:
            stack.push_async_callback(client.close)
        await _check_engines(clients, router, server.service.context)
        await router.start()
        stack.push_async_callback(router.close)
        try:
            await stack.enter_async_context(server)
        except OSError as error:
            raise _not_listening(options, error) from error
        print(  # noqa: T201
            f"miles-session: {server.url} ({renderer.family} renderer, {config.policy} sessions, "
            f"{'token' if token else 'no token'}); open one with POST {server.url}/sessions",
            flush=True,
        )
        gc.freeze()  # what is loaded by now stays: the collector need not look at it again and again
        await stop.wait()


async def _check_engines(clients: Sequence[EngineClient], router: Router, context: ContextWindow) -> None:
    """Ask the engines how long a context they take, and any that come later before they serve.

    Of several engines some may come later; with none of them there is nothing to serve.

    Raises:
        InvalidFieldError: no engine answers.
    """

    async def ask(engine: Engine) -> None:
        client = known[engine.url]
        try:
            context.note(client.url, await client.context_tokens())
        except EngineError as error:
            if error.status != 404:
                raise
            context.note(client.url, None)  # an engine without the call that tells

    known = {client.url: client for client in clients}
    missing = [client.url for client in clients if not await client.healthy()]
    if len(missing) == len(clients):
        raise InvalidFieldError("--engine", ",".join(missing), "no engine answers there; start it first")
    for client in clients:
        if client.url in missing:
            print(f"miles-session: warning: --engine {client.url} does not answer yet", file=sys.stderr)  # noqa: T201
            router.quarantine(client.url, "it did not answer at the start")
        else:
            await ask(client)
    router.on_admit = ask


def _not_listening(options: argparse.Namespace, error: OSError) -> InvalidFieldError:
    known = error.errno in errno.errorcode  # a host that has no address comes with a number of another kind
    reason = os.strerror(error.errno) if known and error.errno else error.strerror or error
    why = f"cannot listen on {options.host}:{options.port}: {reason}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return InvalidFieldError("--port", options.port, f"{why}; choose another, or 0 for any free one")
    return InvalidFieldError("--host", options.host, f"{why}; use an address of this machine")


def _read_token(options: argparse.Namespace) -> str | None:
    if options.token_file is not None:
        try:
            return str(options.token_file.read_text().strip())
        except (OSError, UnicodeDecodeError) as error:
            remedy = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise InvalidFieldError("--token-file", str(options.token_file), remedy) from error
    return os.environ.get(_TOKEN_VARIABLE) or None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before, or beside, the server, which takes the signal itself
        return 130


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["verify"]:
        from miles_rollout.renderers import verify  # its conversation suite is not needed to serve

        return verify.run(arguments[1:])
    parser = make_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if not 0 <= options.port <= 65535:
            raise InvalidFieldError("--port", options.port, "use a number from 0 to 65535")
        config = config_of(options)
        asyncio.run(serve(options, config, _read_token(options)))
    except ValidationError as error:
        return print_problem(parser, first_problem(error), _OPTIONS)
    except InvalidFieldError as error:
        return print_problem(parser, error, _OPTIONS)
    except (MilesError, ValueError, OSError) as error:
        print(f"miles-session: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
