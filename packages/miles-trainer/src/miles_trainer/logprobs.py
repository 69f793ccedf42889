"""Log-probs and entropies of chosen tokens without ever holding all logits.

Logits are made in chunks of positions, in float32 (float64 for a float64 model), divided by the sampling
temperature before the softmax. When everything fits one chunk its probabilities are kept for the backward
pass; otherwise each chunk is computed again there, so memory is one chunk whatever the number of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    *,
    logits_bytes: int,
    entropy: bool,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [P] of `targets` and entropies [P] (nats; None unless asked for) of softmax(logits / T).

    Args:
        hidden: [P, H] final hidden states in the model's dtype.
        weight: [V, H] output embedding.
        bias: [V] or None.
        targets: int64 [P].
        inverse_temperature: [P], 1 / T of each position.
        logits_bytes: bytes of logits that may exist at once.
        entropy: compute entropies.
        entropy_gradient: let the entropies' gradient flow.
    """
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, bias, targets, inverse_temperature, logits_bytes, entropy, entropy_gradient
    )  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


def _work_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunk(hidden: Tensor, weight: Tensor, logits_bytes: int) -> int:
    row_bytes = weight.shape[0] * _work_dtype(hidden).itemsize
    return max(1, logits_bytes // row_bytes)


def _scaled_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: Tensor) -> Tensor:
    """log softmax(logits / T) of all ids, [p, V], in the working dtype."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_work_dtype(hidden))
    logits *= inverse_temperature[:, None]
    return torch.log_softmax(logits, dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        logits_bytes: int,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _work_dtype(hidden)
        count = hidden.shape[0]
        chunk = _chunk(hidden, weight, logits_bytes)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropies = torch.zeros(count if entropy else 0, dtype=dtype, device=hidden.device)
        inverse_temperature = inverse_temperature.to(dtype)
        kept: Tensor | None = None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            table = _scaled_logprobs(hidden[part], weight, bias, inverse_temperature[part])
            logprobs[part] = table.gather(1, targets[part, None]).squeeze(1)
            if entropy:
                entropies[part] = -torch.linalg.vecdot(table.exp(), table)
            if count <= chunk and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
                kept = table
        ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature, kept, entropies)
        ctx.chunk, ctx.entropy_gradient = chunk, entropy and entropy_gradient
        if not ctx.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse_temperature, kept, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = gradients
        accumulate = _work_dtype(hidden)
        grad_hidden = torch.empty_like(hidden)
        single = kept is not None
        grad_weight = None if single else torch.zeros(weight.shape, dtype=accumulate, device=weight.device)
        grad_bias = torch.zeros(bias.shape, dtype=accumulate, device=bias.device) if bias is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            table = kept if single else _scaled_logprobs(hidden[part], weight, bias, inverse_temperature[part])
            grad = table.exp()
            if ctx.entropy_gradient:
                # dH/dz = -p (log p + H)
                upstream = grad_entropies[part, None]
                grad = grad * (-grad_logprobs[part, None] - upstream * (table + entropies[part, None]))
            else:
                grad *= -grad_logprobs[part, None]
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad *= inverse_temperature[part, None]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is None:
                grad_weight = grad.T @ hidden[part]
            else:
                grad_weight += grad.T @ hidden[part]
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        if grad_bias is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None
