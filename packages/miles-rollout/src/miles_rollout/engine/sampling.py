"""Draws the next tokens of a batch, each row by its own parameters and its own random number.

The log-prob of a token is that of softmax(logits / temperature) before any truncation (temperature 1 for a
greedy row). Top-k keeps the k likeliest; top-p the likeliest until their mass in the full distribution reaches
p; min-p those with at least p times the likeliest one's probability; what is drawn satisfies all three.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from miles_rollout.engine.rng import uniforms
from miles_rollout.engine.sequence import Sequence

_CELLS = 1 << 22
"""Rows are drawn in pieces of about so many probabilities, which bounds the float64 workspace."""


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> tuple[list[int], list[float]]:
    """Next token and its log-prob (nats) for each row of `logits` [R, vocabulary].

    A row whose logits hold a NaN gives a log-prob of NaN.
    """
    temperatures = [s.sampling.temperature for s in sequences]
    scores = scale(logits, temperatures)
    logprobs = torch.log_softmax(scores, dim=-1)
    if not any(temperatures):
        ids = logprobs.argmax(dim=-1)
    else:
        seeds = np.array([s.sampling.seed for s in sequences], dtype=np.uint64)
        counts = np.array([s.num_new for s in sequences], dtype=np.uint64)
        numbers = torch.from_numpy(uniforms(seeds, counts)).to(logits.device)
        ids = _draw_rows(logprobs, numbers)
        cut = [i for i, s in enumerate(sequences) if s.sampling.truncates]
        if cut:
            ids[cut] = _draw_truncated(logprobs[cut], numbers[cut], [sequences[i] for i in cut])
        if not all(temperatures):
            greedy = [i for i, t in enumerate(temperatures) if t == 0]
            ids[greedy] = logprobs[greedy].argmax(dim=-1)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def scale(logits: torch.Tensor, temperatures: Rows[float]) -> torch.Tensor:
    """Logits / temperature in float32; temperature 0 counts as 1."""
    scores = logits.float()
    if any(t not in (0.0, 1.0) for t in temperatures):
        divisors = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)
        scores = scores / divisors[:, None]
    return scores


def _draw_rows(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution in float64, row by row."""
    rows, width = logprobs.shape
    piece = max(1, _CELLS // width)
    if rows <= piece:
        return _invert(logprobs.exp(), numbers)
    parts = [_invert(logprobs[i : i + piece].exp(), numbers[i : i + piece]) for i in range(0, rows, piece)]
    return torch.cat(parts)


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index of the token whose stretch of the cumulative weights holds number * total."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Rounding may take number * total up to total itself, past the last token with weight.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp_(max=weights.shape[1] - 1)


def _draw_truncated(logprobs: torch.Tensor, numbers: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    device, width = logprobs.device, logprobs.shape[1]
    ordered, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    settings = [s.sampling for s in sequences]
    top_k = torch.tensor([s.top_k or width for s in settings], device=device)[:, None]
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([s.min_p for s in settings], dtype=torch.float32, device=device)[:, None]
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    # A top_p of 1 keeps everything, also where rounding takes the cumulative sum past 1.
    drop = ((before >= top_p) & (top_p < 1)) | (torch.arange(width, device=device) >= top_k)
    drop |= ordered < ordered[:, :1] * min_p
    kept = ordered.masked_fill(drop, 0.0)
    return order.gather(1, _invert(kept, numbers)[:, None])[:, 0]
