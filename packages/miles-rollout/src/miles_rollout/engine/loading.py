"""Loads a causal LM from a Hugging Face folder and finds out whether it can run on KV slots.

The slot path is not taken on trust: after loading, it has to reproduce the model's own forward pass on a probe
(chunked prompts of different lengths in one pass, then a decode step). A model whose structure or numbers say no
runs on its own cache instead, with the reason in `/get_server_info`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_rollout.engine import attention
from miles_rollout.engine.executors import SlotExecutor
from miles_rollout.engine.routes import RouteRecorder
from miles_rollout.engine.scheduler import Chunk, Limits, Scheduler
from miles_rollout.engine.sequence import Sampling, Sequence

_SLOT_LAYERS = {"full_attention", "sliding_attention"}
_STATEFUL_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the longest sequence of the batch."""


@dataclass
class LoadedModel:
    """A model in eval mode, and how it can be run.

    Attributes:
        slots: whether the slot path is right for it; `reason` says why not.
        routes: hooks that record expert choices, None for a dense model.
        bytes_per_token: KV memory of one token on the slot path.
        probe_error: relative difference of the slot path to the model's own forward pass.
    """

    model: Any
    path: Path
    device: torch.device
    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]
    slots: bool = False
    reason: str = ""
    routes: RouteRecorder | None = None
    bytes_per_token: int = 0
    probe_error: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


def load(path: Path, dtype: str, device: str, *, force_native: bool = False) -> LoadedModel:
    """Load the folder (checked by `folder.check_model_folder` before) and probe the slot path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
    )
    model.to(device)
    model.eval().requires_grad_(False)
    text = model.config.get_text_config()
    loaded = LoadedModel(
        model=model,
        path=path,
        device=torch.device(device),
        context_length=int(getattr(text, "max_position_embeddings", 0) or 1 << 15),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        eos_ids=_eos_ids(path, text),
        routes=RouteRecorder.attach(model),
    )
    loaded.reason = "asked for" if force_native else unsuitable(model)
    if not loaded.reason:
        _probe(loaded)
    return loaded


def unsuitable(model: Any) -> str:
    """Why the structure of a model rules the slot path out; "" when it does not."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    if kinds - _SLOT_LAYERS:
        return f"it has layers of kind {', '.join(sorted(kinds - _SLOT_LAYERS))}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    rope = getattr(text, "rope_parameters", None) or {}
    flat = [rope, *[v for v in rope.values() if isinstance(v, dict)]]
    stateful = {str(r.get("rope_type")) for r in flat} & _STATEFUL_ROPE
    if stateful:
        return f"its rotary embedding ({stateful.pop()}) depends on the longest sequence of the batch"
    return ""


def _eos_ids(path: Path, config: Any) -> frozenset[int]:
    """End tokens of generation_config.json, else of the model's config."""
    value: Any = None
    generation = path / "generation_config.json"
    if generation.is_file():
        value = json.loads(generation.read_text()).get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in (value if isinstance(value, list) else [value]))


def _probe(loaded: LoadedModel) -> None:
    """Compare the slot path with the model's own forward pass; sets `slots`, `reason` and `bytes_per_token`."""
    model, device = loaded.model, loaded.device
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, loaded.vocab_size, size=n, dtype=np.int32) for n in (11, 6, 1)]
    own = model.config._attn_implementation
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.from_numpy(p.astype(np.int64))[None].to(device), use_cache=False)
            .logits[0, -1]
            .float()
            for p in prompts
        ]
    try:
        model.set_attn_implementation(attention.IMPLEMENTATION)
        actual, pools = _probe_slots(loaded, prompts)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        model.set_attn_implementation(own)
        loaded.reason = f"the slot path failed on a probe: {type(error).__name__}: {error}"
        return
    want, got = torch.stack(expected), torch.stack(actual)
    loaded.probe_error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    limit = 1e-3 if model.dtype == torch.float32 else 0.1
    if not loaded.probe_error <= limit:
        model.set_attn_implementation(own)
        loaded.reason = f"the slot path differs from the model's forward pass by {loaded.probe_error:.1e} on a probe"
        return
    loaded.slots, loaded.bytes_per_token = True, pools.bytes_per_slot


def _probe_slots(loaded: LoadedModel, prompts: list[Any]) -> tuple[list[torch.Tensor], attention.SlotPools]:
    limits = Limits(kv_tokens=64, context_length=32, max_running=4, step_tokens=8)
    scheduler = Scheduler(limits, sharing=False)
    pools = attention.SlotPools(limits.kv_tokens + 1, loaded.device)
    executor = SlotExecutor(loaded.model, pools, scheduler.table, loaded.device, loaded.routes)
    last: dict[str, torch.Tensor] = {}
    for i, prompt in enumerate(prompts):
        sequence = Sequence(
            id=str(i), tokens=prompt.copy(), prompt_length=len(prompt), sampling=Sampling(max_new_tokens=1, seed=0)
        )
        scheduler.add(sequence)
    while len(last) < len(prompts):
        chunks: list[Chunk] = scheduler.next_step()
        result = executor.run(chunks)
        scheduler.computed(chunks)
        for chunk, row in result.sampling:
            last[chunk.sequence.id] = result.logits[row].float().clone()
            scheduler.finish(chunk.sequence)
    return [last[str(i)] for i in range(len(prompts))], pools
