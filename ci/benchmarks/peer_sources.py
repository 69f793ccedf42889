"""Peer-to-peer updates from one trainer rank and from several that hold the same, in turn, to the same engines.

    python ci/benchmarks/peer_sources.py [--mib 128] [--ranks 1,2,4] [--engines 2] [--link-mb 100] [--rounds 7]

Every rank and every engine is a process; engines hold the whole model and verify it. Three figures for each number of
ranks, each against one rank of the same round:

- `speedup`: the update's time on this machine, where all processes share the cores and memory's bandwidth;
- `cpu_speedup`: processor time of the busiest rank, which is what remains when cores are not shared;
- `link_speedup`: the update's time when each rank writes through a link of its own of `--link-mb` MB/s, which is made
  by waiting. Between machines a lone rank's link is what limits an update.

`volume` is what leaves the ranks over what the engines have to get, `busiest` the share of the rank that sends most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from sync import Weights, Workers, _serve_receiver, manifest_of, model

from miles_sync.layout import Layout, whole
from miles_sync.peer import PeerReceiver, PeerSender, PeerWriter, merge
from miles_sync.peer.memory import Write
from miles_sync.peer.tcp import TcpBackend
from miles_sync.transfer import minimum_bytes, plan_transfers

BUCKET = 32 << 20


class Link:
    """A writer whose bytes take as long as they would through a link of its own."""

    def __init__(self, writer: PeerWriter, bytes_per_s: float) -> None:
        self._writer, self.bytes_per_s = writer, bytes_per_s
        self.limited = False
        self._free_at = 0.0

    def write(self, handle: str, writes: Sequence[Write]) -> None:
        """Write, and wait until the link would have done so."""
        begin = max(self._free_at, time.perf_counter())
        self._writer.write(handle, writes)
        if self.limited:
            self._free_at = begin + sum(write.data.nbytes for write in writes) / self.bytes_per_s
            time.sleep(max(self._free_at - time.perf_counter(), 0.0))

    def keep(self, handles: Collection[str]) -> None:
        """As the writer."""
        self._writer.keep(handles)

    def close(self) -> None:
        """As the writer."""
        self._writer.close()


def serve_source(
    weights: Weights, source: Layout, target: Layout, handles: list[str], link: float
) -> Callable[[int, Connection], None]:
    """A trainer rank: begins updates, writes rounds, says how much processor time it has had."""

    def serve(rank: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        writer = Link(TcpBackend().writer(), link)
        sender = PeerSender(source, target, rank, writer, handles, BUCKET)
        rounds = iter(())
        while True:
            what, *arguments = pipe.recv()
            answer: Any = None
            if what == "begin":
                update_id, manifest, writer.limited = arguments
                rounds = sender.send(weights, manifest, update_id)
            elif what == "next":
                answer = next(rounds, None)
            else:
                answer = time.process_time()
            pipe.send(answer)

    return serve


class Side:
    """So many ranks, and engines of their own."""

    def __init__(self, weights: Weights, ranks: int, engines: int, link: float) -> None:
        self._manifest = manifest_of(weights)
        specs = self._manifest.tensors
        source, target = whole(specs, ranks), whole(specs, engines)
        self._plan = plan_transfers(source, target)
        sent = self._plan.sent(ranks)
        self.volume, self.busiest = sum(sent) / minimum_bytes(target), max(sent) / sum(sent)
        self._engines = Workers(engines, _serve_receiver(lambda n: PeerReceiver(source, target, n, TcpBackend())))
        self._engines.tell(("handle",))
        handles = self._engines.answers()
        self._ranks = Workers(ranks, serve_source(weights, source, target, handles, link))
        self._count = 0

    def update(self, *, limited: bool = False) -> tuple[float, float]:
        """Seconds of an update, and processor seconds of the busiest rank."""
        self._count += 1
        update_id = f"u{self._count}"
        before = self._cpu()
        began = time.perf_counter()
        for side, message in ((self._engines, ()), (self._ranks, (limited,))):
            side.tell(("begin", update_id, self._manifest, *message))
            side.answers()
        loading = False
        self._ranks.tell(("next",))
        while (parts := self._ranks.answers())[0] is not None:
            self._ranks.tell(("next",))
            if loading:
                self._engines.answers()
            self._engines.tell(("load", merge(self._plan, parts)))
            loading = True
        self._engines.answers()
        self._engines.tell(("commit", update_id))
        self._engines.answers()
        seconds = time.perf_counter() - began
        return seconds, max(after - b for after, b in zip(self._cpu(), before, strict=True))

    def _cpu(self) -> list[float]:
        self._ranks.tell(("cpu",))
        return self._ranks.answers()

    def close(self) -> None:
        """End the processes."""
        self._ranks.close()
        self._engines.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds in which all sides take turns."""
    weights = model(args.mib)
    counts = sorted({1, *(int(count) for count in args.ranks.split(","))})
    sides = {count: Side(weights, count, args.engines, args.link_mb * 1e6) for count in counts}
    for side in sides.values():
        side.update()
    free: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    linked: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(args.rounds):
        for count, side in sides.items():
            free[count].append(side.update())
            linked[count].append(side.update(limited=True)[0])
    for side in sides.values():
        side.close()
    middle = statistics.median
    return {
        f"{count} rank(s)": {
            "volume": sides[count].volume,
            "busiest": sides[count].busiest,
            "update_ms": 1e3 * middle(seconds for seconds, _ in free[count]),
            "speedup": middle(a / b for (a, _), (b, _) in zip(free[1], free[count], strict=True)),
            "cpu_speedup": middle(a / b for (_, a), (_, b) in zip(free[1], free[count], strict=True)),
            "link_update_ms": 1e3 * middle(linked[count]),
            "link_speedup": middle(a / b for a, b in zip(linked[1], linked[count], strict=True)),
        }
        for count in counts
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="size of the model")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of trainer ranks")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--link-mb", type=float, default=100.0, help="MB/s of the link that each rank is given")
    parser.add_argument("--rounds", type=int, default=7)
    found = measure(parser.parse_args())
    print(json.dumps({k: {n: round(v, 3) for n, v in row.items()} for k, row in found.items()}, indent=1))


if __name__ == "__main__":
    main()
