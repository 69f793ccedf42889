"""The `miles-engine` command: checks its options, loads the model, serves until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from miles_contracts import InvalidFieldError, WeightGroupFactory
from miles_rollout.command_line import OneLineParser, first_problem, print_problem
from miles_rollout.engine.config import EngineConfig
from miles_rollout.engine.folder import check_model_folder

if TYPE_CHECKING:
    from miles_rollout.engine.server import EngineServer

READY = "miles-engine ready: "
"""Start of the one line on standard output that says the engine serves; its URL follows."""


def build_parser() -> OneLineParser:
    """One option for each field of EngineConfig."""
    parser = OneLineParser(prog="miles-engine", description="Serve a causal LM over SGLang's native HTTP calls.")
    for name, field in EngineConfig.model_fields.items():
        option = "--" + name.replace("_", "-")
        default = "" if field.is_required() else f" (default: {field.default})"
        if field.annotation is bool:
            parser.add_argument(option, action="store_true", default=None)
        else:
            parser.add_argument(option, required=field.is_required(), metavar=name.upper(), help=default.strip())
    return parser


def parse_config(argv: Sequence[str] | None = None) -> EngineConfig:
    """Options as an EngineConfig; ends the process with a message that names a wrong one."""
    parser = build_parser()
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    try:
        return EngineConfig(**given)
    except ValidationError as error:
        sys.exit(print_problem(parser, first_problem(error), {}))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the slow part of the start so that a taken port is told at once.

    Raises:
        InvalidFieldError: the address cannot be bound.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening waits until the model is loaded: before that, a connection must be refused, not hang.
    except OSError as error:
        raise InvalidFieldError(
            "port", port, f"cannot listen on {host}:{port}: {error.strerror or error}; choose another, or 0"
        ) from error
    return listener


def main(argv: Sequence[str] | None = None, groups: Mapping[str, WeightGroupFactory] | None = None) -> int:
    """Entry point; returns the exit code.

    Args:
        argv: options; None for those of the process.
        groups: ways for weights to come besides `torch.distributed`, by the name of their backend, for programs that
            put an engine together.
    """
    began = time.perf_counter()
    config = parse_config(argv)
    parent = os.getppid()
    try:
        check_model_folder(config.model_path)
        listener = bind(config.host, config.port)
    except InvalidFieldError as error:
        return print_problem(build_parser(), error, {})
    # Threads are set before torch starts its pools; two pools that fight for a core are far slower than one.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        server = build(config, groups)
    except InvalidFieldError as error:
        return print_problem(build_parser(), error, {})
    with listener:
        asyncio.run(serve(server, listener, began, parent if config.end_with_parent else None))
    return 0


def build(config: EngineConfig, groups: Mapping[str, WeightGroupFactory] | None = None) -> EngineServer:
    """Load the model and make the server around it (this imports torch)."""
    import torch

    from miles_rollout.engine.core import EngineCore, make_limits
    from miles_rollout.engine.loading import load
    from miles_rollout.engine.server import EngineServer
    from miles_rollout.engine.text import TextCodec

    torch.set_num_threads(config.threads)
    with contextlib.suppress(RuntimeError):  # settable only once in a process
        torch.set_num_interop_threads(1)
    loaded = load(config.model_path, config.dtype, config.device, force_native=config.force_native_cache)
    info: dict[str, Any] = {
        "engine": "miles",
        "batched_streams": True,
        **config.model_dump(mode="json"),
        "attention": "slots" if loaded.slots else "native",
        "attention_reason": loaded.reason,
        "forward": "lean" if loaded.lean else "transformers",
        "probe_error": loaded.probe_error,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "num_parameters": sum(p.numel() for p in loaded.model.parameters()),
        "routed_experts": None
        if loaded.routes is None
        else {"layers": loaded.routes.layers, "num_experts": loaded.routes.num_experts, "top_k": loaded.routes.top_k},
    }
    server = EngineServer(config, info, groups)
    server.core = EngineCore(
        loaded, make_limits(config, loaded), TextCodec(config.model_path), config.weight_version, server.deliver
    )
    return server


async def serve(server: EngineServer, listener: socket.socket, began: float, parent: int | None) -> None:
    """Serve until SIGTERM or SIGINT (or until the parent is gone), then abort what runs and leave."""
    from aiohttp import web

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        server.application(server.core), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    server.core.start()
    await web.SockSite(runner, listener, backlog=4096).start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"{READY}http://{shown}:{port} after {time.perf_counter() - began:.1f} s", flush=True)  # noqa: T201
    try:
        while not stop.is_set() and (parent is None or os.getppid() == parent):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), timeout=0.5 if parent is not None else None)
    finally:
        await asyncio.to_thread(server.core.stop)
        await runner.cleanup()
