"""What a turn costs after a long history: the session server beside servers that do only what cannot be left out.

A client sends its whole history every turn, and an engine is given all ids of it every turn. So two more servers get
the same bodies in the same run, turn by turn in alternation:

    bare    reads the body (aiohttp, the same limit), decodes its JSON (msgspec) and answers
    relay   does that, and sends an engine as many ids as the history has, ready-made, before it answers

What the session server takes beyond `relay` is its own work: finding what is new, rendering, checking, storing. Time to
answer is the lower quartile, processor time of the server the median of what a turn took: both bear other work beside.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from session_mock import Conversation, open_session

HISTORIES = (1, 4, 16, 64, 128)
"""Thousands of tokens."""
TURNS = 41
_TOKENS_A_TURN = 100


async def run_bare(engine: str, answer: str, max_body_bytes: int, ready: Any) -> None:
    """Serve `/bare` and `/relay?ids=N` on a free port until cancelled."""
    import aiohttp
    from aiohttp import web

    reply = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": answer}}]})
    known: dict[int, bytes] = {}

    def body_of(ids: int) -> bytes:
        if ids not in known:
            known.clear()
            fields = {"input_ids": list(range(1000, 1000 + ids)), "sampling_params": {"max_new_tokens": 64}, "rid": "x"}
            known[ids] = msgspec.json.encode(fields)
        return known[ids]

    async with aiohttp.ClientSession() as http:

        async def bare(request: web.Request) -> web.Response:
            msgspec.json.decode(await request.read())
            return web.Response(body=reply, content_type="application/json")

        async def relay(request: web.Request) -> web.Response:
            msgspec.json.decode(await request.read())
            async with http.post(f"{engine}/generate", data=body_of(int(request.query["ids"]))) as response:
                msgspec.json.decode(await response.read())
            return web.Response(body=reply, content_type="application/json")

        app = web.Application(client_max_size=max_body_bytes)
        app.add_routes([web.post("/bare", bare), web.post("/relay", relay)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready(runner.addresses[0][1])
        await asyncio.Event().wait()


@dataclass
class Served:
    """One kind of server under load: where it listens, whose processor time it takes, and what its turns took."""

    talk: Conversation
    pid: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    async def turn(self, text: str) -> None:
        """One more turn, measured."""
        begun, spent = time.perf_counter(), processor_s(self.pid)
        await self.talk.turn(text)
        self.wall.append(time.perf_counter() - begun)
        self.cpu.append(processor_s(self.pid) - spent)


@dataclass
class Row:
    """One history length: bytes of a body, and of each kind of server milliseconds to answer and of its processor."""

    sent: int
    wall: dict[str, float]
    cpu: dict[str, float]


def processor_s(pid: int) -> float:
    """Processor time that a process has taken, seconds (Linux names its clock after its id)."""
    return time.clock_gettime((~pid << 3) | 2)


async def measure(servers: dict[str, tuple[int, int]], history: int, texts: Any) -> Row:
    """Small turns after `history` tokens, one at each server in turn.

    Args:
        servers: port and process id of `sessions`, `full` (renders all), and `bare` (which also serves `relay`).
        history: tokens of the first message.
        texts: where text comes from.
    """
    kinds: dict[str, Served] = {}
    for name in ("sessions", "full"):
        port, pid = servers[name]
        kinds[name] = Served(Conversation(port, await open_session(port)), pid)
    port, pid = servers["bare"]
    kinds["bare"] = Served(Conversation(port, path="/bare"), pid)
    kinds["relay"] = Served(Conversation(port, path=f"/relay?ids={history + TURNS // 2 * _TOKENS_A_TURN}"), pid)
    first = texts.take(history)
    for kind in kinds.values():
        await kind.talk.turn(first)
    sent = 0
    for number in range(TURNS):
        piece = texts.take(50)
        for name, kind in kinds.items():
            if name != "full" or number % 3 == 0:  # slow, and not needed as exactly
                await kind.turn(piece)
        sent = kinds["sessions"].talk.sent if number == TURNS // 2 else sent
    for kind in kinds.values():
        kind.talk.close()
    return Row(
        sent,
        {name: 1e3 * statistics.quantiles(kind.wall)[0] for name, kind in kinds.items()},
        {name: 1e3 * statistics.median(kind.cpu) for name, kind in kinds.items()},
    )


def report(rows: dict[int, Row]) -> None:
    """The tables; differences of a tenth of a millisecond are noise."""
    columns = ("tokens", "body", "sessions", "bare", "relay", "sessions-bare", "sessions-relay", "rendering all")
    for what in ("wall", "cpu"):
        title = "time to answer" if what == "wall" else "processor time of the server"
        print(f"history: {title}, ms\n" + "  ".join(f"{column:>9}" for column in columns))
        for thousands, row in rows.items():
            ms = getattr(row, what)
            ours = ms["sessions"]
            values = (ours, ms["bare"], ms["relay"], ours - ms["bare"], ours - ms["relay"], ms["full"])
            cells = [f"{thousands}k", f"{row.sent // 1024}k", *(f"{value:.2f}" for value in values)]
            print("  ".join(f"{cell:>{max(9, len(c))}}" for cell, c in zip(cells, columns, strict=True)))
