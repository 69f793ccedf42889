"""Loads a causal LM from a Hugging Face folder and finds out whether it can run on KV slots.

The slot path is not taken on trust: after loading, it has to reproduce the model's own forward pass on a probe
(chunked prompts of different lengths in one pass, then a decode step). A model whose structure or numbers say no
runs on its own cache instead, with the reason in `/get_server_info`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_contracts import InvalidFieldError
from miles_rollout.engine import attention, lean
from miles_rollout.engine.executors import Forward, SlotExecutor, transformers_forward
from miles_rollout.engine.routes import RouteRecorder
from miles_rollout.engine.scheduler import Chunk, Limits, Scheduler
from miles_rollout.engine.sequence import Sampling, Sequence

_SLOT_LAYERS = {"full_attention", "sliding_attention"}
_FAR = 1 << 15
"""How far out the lean forward pass is tried."""
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
        forward: the forward pass of the slot path; `lean` says whether it is ours or transformers' own.
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
    forward: Forward | None = None
    lean: bool = False


def load(path: Path, dtype: str, device: str, *, force_native: bool = False) -> LoadedModel:
    """Load the folder (checked by `folder.check_model_folder` before) and probe the slot path."""
    attention.register()
    model = _read_model(path, dtype)
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


def _read_model(path: Path, dtype: str) -> Any:
    """The folder's model, with every one of its tensors from the folder.

    Raises:
        InvalidFieldError: it cannot be read, or tensors are missing (transformers would make them up).
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        auto: Any = AutoModelForCausalLM
        model, info = auto.from_pretrained(
            path,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidFieldError("model_path", str(path), f"it cannot be loaded: {reason}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3])
        raise InvalidFieldError("model_path", str(path), f"its weight files lack {len(missing)} tensors: {shown}")
    return model


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
    """Compare slot paths with the model's own forward pass: the lean one if there is one, else transformers'."""
    model, device = loaded.model, loaded.device
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, loaded.vocab_size, size=n, dtype=np.int32) for n in (11, 6, 1)]
    own = model.config._attn_implementation
    with torch.inference_mode():
        rows = [torch.from_numpy(p.astype(np.int64))[None].to(device) for p in prompts]
        expected = torch.stack([model(input_ids=row, use_cache=False).logits[0, -1].float() for row in rows])
    model.set_attn_implementation(attention.IMPLEMENTATION)
    plain = transformers_forward(model)
    candidates: list[tuple[bool, Forward]] = [(False, plain)]
    decoder = _lean_decoder(loaded, plain)
    if decoder is not None:
        candidates.insert(0, (True, decoder))
    for is_lean, forward in candidates:
        loaded.reason = _try(loaded, forward, prompts, expected)
        if not loaded.reason:
            loaded.slots, loaded.lean, loaded.forward = True, is_lean, forward
            return
    model.set_attn_implementation(own)


def _lean_decoder(loaded: LoadedModel, plain: Forward) -> Forward | None:
    """The lean forward pass, if the model has one that also agrees far out in the context.

    Some models change their attention with the absolute position, which short prompts cannot show.
    """
    try:
        decoder, trial = lean.build(loaded.model), lean.build(loaded.model)
        if decoder is None or trial is None:
            return None
        first = max(min(loaded.context_length, _FAR) - 8, 0)
        near, far = _at_positions(loaded, plain, first), _at_positions(loaded, trial, first)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None  # whatever the model does there, it is not what the lean pass expects
    limit = 1e-4 if loaded.model.dtype == torch.float32 else 0.1
    return decoder if float((near - far).norm()) <= limit * float(near.norm()) else None


@torch.inference_mode()
def _at_positions(loaded: LoadedModel, forward: Forward, first: int) -> torch.Tensor:
    """Logits of seven tokens that are told to stand at positions `first` .. and see only each other."""
    count, device = 7, loaded.device
    step = attention.Step(
        pools=attention.SlotPools(count + 1, device),
        write=torch.arange(1, count + 1, device=device),
        table=np.arange(1, count + 1, dtype=np.int32)[None],
        rows=np.array([0]),
        starts=np.array([0]),
        counts=np.array([count]),
        dtype=loaded.model.dtype,
    )
    ids = torch.arange(count, device=device) % loaded.vocab_size
    with attention.active(step):
        return forward(ids, first + torch.arange(count, device=device), None).float()


def _try(loaded: LoadedModel, forward: Forward, prompts: list[Any], expected: torch.Tensor) -> str:
    """Run the probe; "" when the path is right, else why not. Sets `bytes_per_token` and `probe_error`."""
    try:
        actual, pools = _probe_slots(loaded, forward, prompts)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return f"the slot path failed on a probe: {type(error).__name__}: {error}"
    difference = float((torch.stack(actual) - expected).norm() / expected.norm().clamp_min(1e-30))
    loaded.probe_error, loaded.bytes_per_token = difference, pools.bytes_per_slot
    limit = 1e-4 if loaded.model.dtype == torch.float32 else 0.1
    if difference <= limit:
        return ""
    return f"the slot path differs from the model's forward pass by {difference:.1e} on a probe"


def _probe_slots(
    loaded: LoadedModel, forward: Forward, prompts: list[Any]
) -> tuple[list[torch.Tensor], attention.SlotPools]:
    limits = Limits(kv_tokens=64, context_length=32, max_running=4, step_tokens=8)
    scheduler = Scheduler(limits, sharing=False)
    pools = attention.SlotPools(limits.kv_tokens + 1, loaded.device)
    executor = SlotExecutor(forward, loaded.model.dtype, pools, scheduler.table, loaded.device, loaded.routes)
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
