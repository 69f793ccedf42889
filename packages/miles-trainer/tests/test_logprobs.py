"""Chunked log-probs and entropies against dense float64 ones, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles_trainer.logprobs import token_logprobs

P, H, V = 7, 5, 11


def inputs(dtype: torch.dtype, *, bias: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(P, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(V, (P,), generator=g)
    inverse = torch.rand(P, generator=g, dtype=torch.float64) + 0.5
    return hidden, weight, b, targets, inverse


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_equals_dense(rows: int, bias: bool, gradient: bool) -> None:
    hidden, weight, b, targets, inverse = inputs(torch.float64, bias=bias)
    got, entropy = token_logprobs(
        hidden, weight, b, targets, inverse, logits_bytes=rows * V * 8, entropy=True, entropy_gradient=gradient
    )
    # the definition, written out in numpy
    logits = hidden.detach().numpy() @ weight.detach().numpy().T + (0 if b is None else b.detach().numpy())
    logits = logits * inverse.numpy()[:, None]
    table = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(got.detach().numpy(), table[np.arange(P), targets.numpy()], atol=1e-12)
    assert entropy is not None
    np.testing.assert_allclose(entropy.detach().numpy(), -(np.exp(table) * table).sum(1), atol=1e-12)
    # gradients against autograd of the dense formula
    up = torch.linspace(-1, 2, P, dtype=torch.float64)
    loss = (got * up).sum() + ((entropy * up.flip(0)).sum() if gradient else 0)
    leaves = [x for x in (hidden, weight, b) if x is not None]
    mine = torch.autograd.grad(loss, leaves)
    dense = torch.nn.functional.linear(hidden, weight, b) * inverse[:, None]
    logp = dense.log_softmax(-1)
    h = -(logp.exp() * logp).sum(-1)
    want_loss = (logp.gather(1, targets[:, None])[:, 0] * up).sum() + ((h * up.flip(0)).sum() if gradient else 0)
    for a, e in zip(mine, torch.autograd.grad(want_loss, leaves), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 1000))
def test_chunk_size_does_not_matter(rows: int, seed: int) -> None:
    hidden, weight, _, targets, inverse = inputs(torch.float32, bias=False, seed=seed)
    results = []
    for bytes_ in (rows * V * 4, 1 << 20):
        got, _ = token_logprobs(hidden, weight, None, targets, inverse, logits_bytes=bytes_, entropy=False)
        results.append((got.detach(), *torch.autograd.grad(got.sum(), (hidden, weight))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_softmax_is_float32() -> None:
    hidden, weight, _, targets, inverse = inputs(torch.bfloat16, bias=False)
    got, _ = token_logprobs(hidden, weight, None, targets, inverse, logits_bytes=1 << 20, entropy=False)
    assert got.dtype == torch.float32
    dense = ((hidden @ weight.T).float() * inverse[:, None].float()).log_softmax(-1)
    torch.testing.assert_close(got, dense.gather(1, targets[:, None])[:, 0])
    got.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_logits_never_exceed_the_chunk() -> None:
    positions, vocab, rows = 400, 3000, 10
    hidden = torch.randn(positions, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return out

    targets = torch.zeros(positions, dtype=torch.int64)
    with Watch():
        got, _ = token_logprobs(
            hidden, weight, None, targets, torch.ones(positions), logits_bytes=rows * vocab * 4, entropy=True
        )
        got.sum().backward()
    assert largest == rows * vocab


def test_no_positions() -> None:
    hidden, weight = torch.zeros(0, H, requires_grad=True), torch.zeros(V, H, requires_grad=True)
    got, _ = token_logprobs(
        hidden, weight, None, torch.zeros(0, dtype=torch.int64), torch.zeros(0), logits_bytes=1 << 20, entropy=False
    )
    got.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
