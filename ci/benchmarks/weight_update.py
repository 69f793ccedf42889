"""Whole weight updates of real engine processes, pause to return, against copying the same bytes in memory.

    python ci/benchmarks/weight_update.py [--engines 2] [--repeat 5] [--only TRANSPORT] [--json FILE]

A random Qwen3 of 253 MiB in bfloat16 is served by embedded engines; every update goes through the transaction over
HTTP, with digests, as in a run. The limit is what memory alone would need: one copy of the model an engine.
`broadcast` is also held against a raw gloo broadcast of as many bytes in buckets of the same size, between processes
of the same run. Best of the repetitions; the third update is the first one that finds memory to use again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from engine import start_engine
from sync import BUCKET_MIB, RawGloo, best
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_contracts import PauseMode, WeightManifest
from miles_loop.senders import make_sender
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import BroadcastTransport, DiskTransport, FleetTransport, LocalTransport, PeerTransport
from miles_rollout.engine_client import EngineClient
from miles_sync import update_weights
from miles_sync.messages import GroupOffer, peer_group_backend
from miles_sync.tensors import spec_of
from miles_trainer import Trainer, TrainerConfig


class Source:
    """A trainer as the transaction sees it; the transport's sender works on threads."""

    def __init__(self, settings: SenderSettings, trainer: Trainer) -> None:
        self.sender, self._trainer, self._count = make_sender(settings), trainer, 0

    def _manifest(self, version: int) -> WeightManifest:
        specs = tuple(spec_of(name, tensor) for name, tensor in self._trainer.export_weights())
        return WeightManifest(version=version, tensors=specs)

    async def connect(self, receivers: Sequence[str], *, split: bool, digests: bool = True) -> GroupOffer | None:
        return await asyncio.to_thread(self.sender.connect, receivers, self._manifest(0).tensors, split, digests)

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self._count += 1
        self._current = self._manifest(version)
        return f"update-{self._count}", self._current

    async def buckets(self, update_id: str) -> AsyncIterator[Any]:
        sending = self.sender.send(self._trainer.export_weights(), self._current, update_id)
        while (bucket := await asyncio.to_thread(next, sending, None)) is not None:
            yield bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        await asyncio.to_thread(self.sender.acknowledge, update_id, index)

    async def release(self, update_id: str) -> None:
        await asyncio.to_thread(self.sender.release, update_id)


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def copy_s(num_bytes: int, times: int, repeat: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def work() -> None:
        for _ in range(times):
            np.copyto(target, source)

    return best(repeat, work)


def settings_of(name: str, folder: Path) -> SenderSettings:
    transport, _, peers = name.partition("-")
    store = str(folder / "store")
    return SenderSettings(transport=transport, bucket_bytes=BUCKET_MIB << 20, peer_backend=peers or "tcp", store=store)


def transport_of(name: str, source: Source, folder: Path, model: Path) -> FleetTransport:
    kind, _, peers = name.partition("-")
    match kind:
        case "broadcast":
            return BroadcastTransport(source)
        case "peer":
            return PeerTransport(source, peer_group_backend(peers), 60)
        case "disk":
            return DiskTransport(folder / "store", folder / "checkpoint", model)
        case _:
            return LocalTransport()


def step(trainer: Trainer) -> None:
    """Every weight changes a little, as a step would have it."""
    with torch.no_grad():
        for parameter in trainer.backend.policy.model.parameters():
            parameter.mul_(1.001)


async def measure(names: Sequence[str], urls: Sequence[str], model: Path, repeat: int) -> dict[str, dict[str, float]]:
    trainer = Trainer(model, TrainerConfig(dtype="bfloat16"), seed=0)
    num_bytes = sum(tensor.nbytes for _, tensor in trainer.export_weights())
    clients = [EngineClient(url) for url in urls]
    limit = copy_s(num_bytes, len(urls), repeat)
    results: dict[str, dict[str, float]] = {"memory copies": {"mib": num_bytes / 2**20, "seconds": limit}}
    raw = RawGloo(num_bytes, len(urls))
    version = 0
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix="miles-bench-"))
        source = Source(settings_of(name, folder), trainer)
        transport, paused, bare = transport_of(name, source, folder, model), [], []
        try:
            for number in range(repeat + 2):
                version += 1
                step(trainer)
                if name == "broadcast":
                    bare.append(best(1, raw.send))
                engines = await transport.connect(clients)
                report = await update_weights(
                    engines, source, version=version, mode=PauseMode.RETRACT, deadline_s=300, in_flight=2
                )
                if number >= 2:
                    paused.append(report.paused_s)
        finally:
            source.sender.close()
            shutil.rmtree(folder, ignore_errors=True)
        results[name] = {"seconds": min(paused), "copies_vs_this": limit / min(paused)}
        if bare:
            results[name]["raw_gloo_s"] = min(bare[2:])
            results[name]["raw_gloo_vs_this"] = min(bare[2:]) / min(paused)
        print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    raw.pool.close()
    for client in clients:
        await client.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", default="", help="transports whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in ("local", "broadcast", "peer-tcp", "peer-shared", "disk") if options.only in n]
    folder = Path(tempfile.mkdtemp(prefix="miles-bench-model-"))
    started = []
    try:
        save_model(folder)
        module = "miles_loop.engine_process"  # with peers as a way for weights to come
        started = [start_engine(folder, "--kv-memory-mb", "64", module=module) for _ in range(options.engines)]
        results = asyncio.run(measure(names, [url for _, url, _ in started], folder, options.repeat))
        print("memory copies", {key: round(value, 3) for key, value in results["memory copies"].items()})
    finally:
        for process, *_ in started:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
