"""Drives an EngineCore step by step in the test's own thread, without HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_rollout.engine.config import EngineConfig
from miles_rollout.engine.core import EngineCore, make_limits
from miles_rollout.engine.loading import LoadedModel, load
from miles_rollout.engine.sequence import Sampling, Sequence, State
from miles_rollout.engine.text import TextCodec


def make_core(folder: Path, *, loaded: LoadedModel | None = None, **options: Any) -> EngineCore:
    """A core whose thread never starts."""
    config = EngineConfig(model_path=folder, **options)
    loaded = loaded or load(folder, config.dtype, config.device, force_native=config.force_native_cache)
    return EngineCore(loaded, make_limits(config, loaded), TextCodec(folder), "0", lambda _: None)


def request(prompt: list[int], new: int, name: str, **params: Any) -> Sequence:
    """A sequence as the HTTP side would make it."""
    first_logprob = params.pop("first_logprob", -1)
    tokens = np.zeros(len(prompt) + new, dtype=np.int32)
    tokens[: len(prompt)] = prompt
    sampling = Sampling(max_new_tokens=new, **{"seed": 0, **params})
    return Sequence(id=name, tokens=tokens, prompt_length=len(prompt), sampling=sampling, first_logprob=first_logprob)


def finish_all(core: EngineCore, sequences: list[Sequence] | None = None) -> None:
    """Submit and step until nothing is left."""
    if sequences:
        core.submit(sequences)
    while core._has_work():
        core._step()
    assert all(s.state is State.FINISHED for s in sequences or [])


def float64_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T - 1, vocabulary] of a plain forward pass in float64; row t predicts token t + 1."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def worst_error(model: Any, sequence: Sequence, temperature: float = 1.0) -> float:
    """Largest difference between a sequence's log-probs and float64 ones of its own tokens."""
    tokens = sequence.known.tolist()
    exact = float64_logprobs(model, tokens, temperature)
    chosen = exact[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])][sequence.prompt_length - 1 :]
    return float((chosen - torch.tensor(sequence.logprobs, dtype=torch.float64)).abs().max())
