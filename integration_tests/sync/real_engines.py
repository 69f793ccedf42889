"""A tiny model, engines in processes of their own that serve it, and a trainer in this process that sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_contracts import SamplingParams, TensorSpec, WeightManifest, WeightUpdateError
from miles_loop.senders import WeightSender
from miles_loop.transports import BroadcastTransport, DiskTransport, FleetTransport, LocalTransport, PeerTransport
from miles_rollout.engine_client import EngineClient
from miles_sync.messages import GroupOffer, PeerBucket, peer_group_backend

PROMPT = [3, 14, 15, 9, 26, 5]


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def weights_of(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Canonical names, sorted, the tied head once."""
    return {n: t for n, t in sorted(model.state_dict().items()) if n != "lm_head.weight"}


def manifest_of(weights: dict[str, torch.Tensor], version: int) -> WeightManifest:
    specs = [TensorSpec(name=n, dtype="float32", shape=tuple(t.shape)) for n, t in weights.items()]
    return WeightManifest(version=version, tensors=tuple(specs))


async def probe(engine: EngineClient) -> tuple[list[int], list[float]]:
    result = await engine.generate(PROMPT, SamplingParams(max_new_tokens=4, top_k=1, ignore_eos=True))
    return list(result.output_ids), list(result.logprobs)


async def assert_serves(engine: EngineClient, model: Qwen3ForCausalLM, version: int) -> None:
    """The engine's log-probs are those of a plain forward pass of the trainer's model."""
    assert await engine.weight_version() == version
    ids, logprobs = await probe(engine)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0].double()
    expected = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert ids == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert torch.allclose(torch.tensor(logprobs, dtype=torch.float64), expected, atol=2e-5)


class Trainer:
    """The trainer's side of an update, with any sender, on threads as a process of its own would be.

    Attributes:
        model: what is sent next.
        corrupt: tensor whose announced digest is wrong.
        stumble_at: index of the bucket at which the trainer fails.
        before: called with each bucket before it is handed out.
    """

    def __init__(self, sender: WeightSender, model: Qwen3ForCausalLM) -> None:
        self.sender, self.model = sender, model
        self.corrupt = ""
        self.stumble_at: int | None = None
        self.before: Any = lambda bucket: None
        self._count = 0

    async def connect(self, receivers: Sequence[str], *, split: bool) -> GroupOffer | None:
        specs = manifest_of(weights_of(self.model), 0).tensors
        return await asyncio.to_thread(self.sender.connect, receivers, specs, split)

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self._count += 1
        self._weights = weights_of(self.model)
        self._manifest = manifest_of(self._weights, version)
        return f"update-{version}-{self._count}-{id(self):x}", self._manifest

    async def buckets(self, update_id: str) -> AsyncIterator[Any]:
        sending = self.sender.send(self._weights.items(), self._manifest, update_id)
        while (bucket := await asyncio.to_thread(next, sending, None)) is not None:
            if bucket.index == self.stumble_at:
                raise WeightUpdateError("the trainer stumbles")
            self.before(bucket)
            yield with_wrong_digest(bucket, self.corrupt) if self.corrupt else bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        self.sender.acknowledge(update_id, index)

    async def release(self, update_id: str) -> None:
        await asyncio.to_thread(self.sender.release, update_id)


def with_wrong_digest(bucket: Any, name: str) -> Any:
    """The bucket with another digest for one tensor, as if its bits had changed on the way; peers number theirs."""
    if isinstance(bucket, PeerBucket):
        written = tuple(msgspec.structs.replace(w, digest="xxh3_128:" + "0" * 32) for w in bucket.written)
        return msgspec.structs.replace(bucket, written=written)
    placed = tuple(
        msgspec.structs.replace(p, spec=msgspec.structs.replace(p.spec, digest="xxh3_128:" + "0" * 32))
        if p.spec.name == name
        else p
        for p in bucket.tensors
    )
    return msgspec.structs.replace(bucket, tensors=placed)


def make_transport(kind: str, trainer: Trainer, folder: Path, model: Path) -> FleetTransport:
    """The driver's end of `local`, `broadcast`, `peer-tcp`, `peer-shared` or `disk`."""
    if kind == "broadcast":
        return BroadcastTransport(trainer)
    if kind.startswith("peer-"):
        return PeerTransport(trainer, peer_group_backend(kind.removeprefix("peer-")), 60)
    if kind == "disk":
        return DiskTransport(folder / "store", folder / "checkpoint", model)
    return LocalTransport()
