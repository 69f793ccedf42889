"""Speed of the session server in front of an engine that answers at once.

    python ci/benchmarks/session.py [latency] [saturation] [long] [routing] [history]

Three processes: session server, mock engine, load generator (this one). Each figure is also taken with a server that
renders and tokenises the whole history every turn, which is what a chat server in front of an engine does.

    latency     100 turns/s offered over 64 sessions with 4k tokens of history: time to answer, event-loop lag
    saturation  64 sessions x 20 turns x (200 in + 200 out) tokens, closed loop
    long        4 sessions x 128 turns, to 64k tokens of history
    routing     16 sessions x 20 turns, the engine returns 480 bytes of routing for each token fed
    history     time of a turn after 1k .. 128k tokens of history, beside servers that only read and pass on
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import pydoc_data.topics
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import session_history
from session_mock import Conversation, open_session, serve_mock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REFERENCE = {"saturation": 114.0, "long": 48.0, "routing": 37.0}
"""Turns a second of the reference implementation in these set-ups, on two cores; with routing it took 2.1 GiB."""
ROUTING_LAYERS, ROUTING_BYTES, EXPERTS = 15, 480, 256
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def corpus() -> str:
    """English prose that every Python has."""
    return "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))


def write_model(folder: Path) -> None:
    """A byte-level tokenizer of 16k tokens with Qwen's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([corpus()], trainer)
    tokenizer.add_special_tokens(list(CONTROL[:3]))
    tokenizer.add_tokens(list(CONTROL[3:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


class Texts:
    """Pieces of prose of a given number of tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ids = self.tokenizer.encode(re.sub(r"\s+", " ", corpus())).ids
        self._at = 0

    def take(self, tokens: int) -> str:
        """The next piece."""
        piece = self.ids[self._at : self._at + tokens]
        while len(piece) < tokens:
            piece += self.ids[: tokens - len(piece)]
        self._at = (self._at + tokens) % len(self.ids)
        return str(self.tokenizer.decode(piece))


# -- the two servers, each a process of its own -----------------------------------------------------------------


class _RendersAll:
    """A renderer that does the work of rendering and tokenising everything, every turn."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render_suffix(self, history: Any, history_ids: Any, appended: Any, tools: Any = ()) -> Any:
        self._renderer.render([*history, *appended], tools)
        return self._renderer.render_suffix(history, history_ids, appended, tools)


async def run_server(engine: str, model: Path, *, full: bool, routing: bool) -> None:
    """Serve until stdin closes, then tell what it took."""
    from miles_rollout.engine_client import EngineClient
    from miles_rollout.renderers import load_renderer
    from miles_rollout.session import SessionConfig, SessionServer

    renderer: Any = load_renderer(model, "qwen3")
    if full:
        renderer = _RendersAll(renderer)
    config = SessionConfig(record_routing=routing, num_experts=EXPERTS if routing else None)
    lags: list[float] = []

    async def measure_lag() -> None:
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - due)

    client = EngineClient(engine, routing_layers=ROUTING_LAYERS)
    async with client, SessionServer(client, renderer, config) as server:
        gc.freeze()  # as the command does: what is loaded stays, and need not be looked at again
        watch = asyncio.create_task(measure_lag())
        before = time.process_time()
        print(server.url.rpartition(":")[2], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        watch.cancel()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lags.sort()
        report = {
            "peak_mib": peak / 1024,
            "lag_p99_ms": 1e3 * lags[int(0.99 * (len(lags) - 1))] if lags else 0.0,
            "cpu_s": time.process_time() - before,
        }
        print(json.dumps(report), flush=True)


async def run_mock(output_ids: list[int], routing_bytes: int) -> None:
    """Be the engine until stdin closes, then tell what it took."""
    mock = asyncio.create_task(serve_mock(output_ids, routing_bytes, lambda port: print(port, flush=True)))
    await asyncio.sleep(0)
    before = time.process_time()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps({"cpu_s": time.process_time() - before}), flush=True)
    mock.cancel()


@dataclass
class Server:
    """A running pair of session server and mock engine, and what they report at the end."""

    port: int
    pid: int
    report: dict[str, float]
    mock: dict[str, float]


def start(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """This script in another role, and the port that it says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@contextlib.contextmanager
def processes(model: Path, output_ids: list[int], *, full: bool = False, routing: int = 0) -> Iterator[Server]:
    """Start both, and after the load take the server's report."""
    started: list[subprocess.Popen[str]] = []
    try:
        mock, engine = start("--role", "mock", "--ids", json.dumps(output_ids), "--routing", str(routing))
        started.append(mock)
        flags = [*(["--full"] if full else []), *(["--routing", "1"] if routing else [])]
        server, port = start(
            "--role", "server", "--engine", f"http://127.0.0.1:{engine}", "--model", str(model), *flags
        )
        started.append(server)
        running = Server(port, server.pid, {}, {})
        yield running
        running.report = json.loads(server.communicate("", timeout=60)[0])
        running.mock = json.loads(mock.communicate("", timeout=60)[0])
    finally:
        for process in started:
            process.kill()
            process.wait()


# -- loads ------------------------------------------------------------------------------------------------------


async def closed_loop(port: int, sessions: int, turns: int, tokens: int, texts: Texts) -> float:
    """Every session asks again as soon as it is answered; returns turns a second."""
    pieces = [[texts.take(tokens) for _ in range(turns)] for _ in range(sessions)]
    talks = [Conversation(port, await open_session(port)) for _ in range(sessions)]

    async def talk(conversation: Conversation, texts_of: list[str]) -> None:
        for piece in texts_of:
            await conversation.turn(piece)

    started = time.perf_counter()
    await asyncio.gather(*(talk(c, p) for c, p in zip(talks, pieces, strict=True)))
    elapsed = time.perf_counter() - started
    for conversation in talks:
        conversation.close()
    return sessions * turns / elapsed


async def open_loop(port: int, sessions: int, history: int, rate: float, seconds: float, texts: Texts) -> list[float]:
    """Turns arrive on a clock, whatever the answers do; returns the times to answer."""
    talks = [Conversation(port, await open_session(port)) for _ in range(sessions)]
    for conversation in talks:
        await conversation.turn(texts.take(history))
    times: list[float] = []

    async def turn(conversation: Conversation, piece: str) -> None:
        begun = time.perf_counter()
        await conversation.turn(piece)
        times.append(time.perf_counter() - begun)

    tasks = []
    start = time.perf_counter()
    for i in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + i / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(turn(talks[i % sessions], texts.take(20))))
    await asyncio.gather(*tasks)
    return sorted(times)


# -- figures ----------------------------------------------------------------------------------------------------


def throughput(name: str, model: Path, texts: Texts, sessions: int, turns: int, routing: int = 0) -> None:
    """One saturation figure, ours and with full rendering."""
    output = [*texts.ids[1000:1199], texts.tokenizer.token_to_id("<|im_end|>")]
    results = {}
    for full in (False, True):
        with processes(model, output, full=full, routing=routing) as server:
            before = time.process_time()
            rate = asyncio.run(closed_loop(server.port, sessions, turns, 200, texts))
            load = time.process_time() - before
        results[full] = rate, server, load
    (ours, server, load), (theirs, _, _) = results[False], results[True]
    spent = [1e3 * s / (sessions * turns) for s in (server.report["cpu_s"], server.mock["cpu_s"], load)]
    # Two cores shared with other work give fewer turns; the processor time of a turn says what they give alone.
    alone = 1e3 / max(spent[0], sum(spent) / 2)
    print(
        f"{name:<11} {sessions:>3} x {turns:<3} {ours:7.0f} turns/s  ({ours / REFERENCE[name]:.1f} x the reference's "
        f"{REFERENCE[name]:.0f}; {ours / theirs:.1f} x full rendering's {theirs:.0f})  "
        f"server: {server.report['peak_mib']:.0f} MiB peak\n{'':<22}CPU a turn: server {spent[0]:.2f} ms, "
        f"mock engine {spent[1]:.2f} ms, load {spent[2]:.2f} ms; two idle cores give at most {alone:.0f} turns/s"
    )


def latency(model: Path, texts: Texts) -> None:
    """Time to answer at 100 turns a second."""
    output = [*texts.ids[1000:1019], texts.tokenizer.token_to_id("<|im_end|>")]
    for full in (False, True):
        with processes(model, output, full=full) as server:
            times = asyncio.run(open_loop(server.port, 64, 4096, 100.0, 10.0, texts))
        p50, p99 = (1e3 * times[int(q * (len(times) - 1))] for q in (0.5, 0.99))
        print(
            f"latency     {'full rendering' if full else 'session server'}  p50 {p50:.2f} ms  p99 {p99:.2f} ms  "
            f"event-loop lag p99 {server.report['lag_p99_ms']:.2f} ms"
        )


def history(model: Path, texts: Texts) -> None:
    """Time of a turn against the length of what came before, beside what cannot be left out of it."""
    output = [*texts.ids[1000:1049], texts.tokenizer.token_to_id("<|im_end|>")]
    answer = texts.tokenizer.decode(output)
    with processes(model, output) as ours, processes(model, output, full=True) as theirs:
        mock, engine = start("--role", "mock", "--ids", json.dumps(output))
        bare, port = start("--role", "bare", "--engine", f"http://127.0.0.1:{engine}", "--answer", answer)
        try:
            served = {
                "sessions": (ours.port, ours.pid),
                "full": (theirs.port, theirs.pid),
                "bare": (port, bare.pid),
            }
            rows = {h: asyncio.run(session_history.measure(served, h << 10, texts)) for h in session_history.HISTORIES}
        finally:
            for process in (mock, bare):
                process.kill()
                process.wait()
    session_history.report(rows)


def main() -> None:
    """Run the chosen figures."""
    names = ("latency", "saturation", "long", "routing", "history")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[*names, []], help="default: all")
    parser.add_argument("--role", choices=("mock", "server", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--ids", help=argparse.SUPPRESS)
    parser.add_argument("--routing", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "mock":
        asyncio.run(run_mock(json.loads(options.ids), options.routing))
        return
    if options.role == "server":
        asyncio.run(run_server(options.engine, options.model, full=options.full, routing=bool(options.routing)))
        return
    if options.role == "bare":
        from miles_rollout.session import SessionConfig

        limit = SessionConfig().max_body_bytes
        asyncio.run(
            session_history.run_bare(options.engine, options.answer, limit, lambda port: print(port, flush=True))
        )
        return
    chosen = options.figures or names
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        texts = Texts(model)
        if "latency" in chosen:
            latency(model, texts)
        if "saturation" in chosen:
            throughput("saturation", model, texts, 64, 20)
        if "long" in chosen:
            throughput("long", model, texts, 4, 128)
        if "routing" in chosen:
            throughput("routing", model, texts, 16, 20, ROUTING_BYTES)
        if "history" in chosen:
            history(model, texts)


if __name__ == "__main__":
    main()
