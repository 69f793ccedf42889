"""A tiny model, what an engine that serves it has to answer, and the transports of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from weight_trainer import Trainer

from miles_contracts import SamplingParams
from miles_loop.transports import BroadcastTransport, DiskTransport, FleetTransport, LocalTransport, PeerTransport
from miles_rollout.engine_client import EngineClient
from miles_sync.messages import peer_group_backend

PROMPT = [3, 14, 15, 9, 26, 5]


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=65536,  # an embedding large enough to be broadcast from where it is
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


def make_transport(kind: str, trainer: Trainer, folder: Path, model: Path) -> FleetTransport:
    """The driver's end of a transport: peers are `peer-tcp`, `peer-shared` and, of two trainer ranks, `joint-tcp`."""
    if kind == "broadcast":
        return BroadcastTransport(trainer)
    if kind.startswith("peer-"):
        return PeerTransport(trainer, peer_group_backend(kind.removeprefix("peer-")), 60)
    if kind == "joint-tcp":
        return PeerTransport(trainer, peer_group_backend("tcp"), 60, senders=2)
    if kind == "disk":
        return DiskTransport(folder / "store", folder / "checkpoint", model)
    return LocalTransport()
