"""The optimiser against AdamW written out here, and the schedule against its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_trainer.config import OptimizerConfig, ScheduleConfig
from miles_trainer.errors import NonFiniteError
from miles_trainer.optimizer import MasterAdamW, global_norm
from miles_trainer.schedule import factor


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(3, 4, generator=g, dtype=torch.float64).to(dtype)),
        "norm": torch.nn.Parameter(torch.randn(4, generator=g, dtype=torch.float64).to(dtype)),
    }


def test_adamw_with_clipping_and_decay() -> None:
    config = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=0.5)
    ours = parameters()
    optimizer = MasterAdamW(ours, config)
    values = {n: p.detach().numpy().copy() for n, p in ours.items()}
    m = {n: np.zeros_like(v) for n, v in values.items()}
    v2 = {n: np.zeros_like(v) for n, v in values.items()}
    rng = np.random.default_rng(0)
    for t in range(1, 6):
        lr = 0.01 * t
        grads = {n: rng.normal(size=v.shape) for n, v in values.items()}
        for n, p in ours.items():
            p.grad = torch.from_numpy(grads[n].copy())
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        assert optimizer.step(lr) == pytest.approx(norm, rel=1e-12)
        for n, g in grads.items():
            g = g * min(1.0, 0.5 / norm)
            m[n] = 0.9 * m[n] + 0.1 * g
            v2[n] = 0.95 * v2[n] + 0.05 * g * g
            decay = 0.1 if values[n].ndim >= 2 else 0.0
            step = (m[n] / (1 - 0.9**t)) / (np.sqrt(v2[n] / (1 - 0.95**t)) + 1e-8)
            values[n] = values[n] * (1 - lr * decay) - lr * step
            np.testing.assert_allclose(ours[n].detach().numpy(), values[n], rtol=1e-9, atol=1e-12)


def test_bfloat16_gradients_add_up_in_float32() -> None:
    p = {"w": torch.nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))}
    optimizer = MasterAdamW(p, OptimizerConfig())
    for _ in range(512):
        (p["w"] * 1.0).sum().backward()
        assert p["w"].grad is None
    # bfloat16 would have stopped at 256
    assert optimizer.gradients()["w"].item() == 512
    optimizer.zero_grad()
    assert optimizer.gradients() == {}


def test_state_round_trip_is_exact() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = parameters(dtype), parameters(dtype)
        first, second = MasterAdamW(a, OptimizerConfig(lr=0.1)), MasterAdamW(b, OptimizerConfig(lr=0.1))
        for optimizer, params, steps in ((first, a, 3), (second, b, 0)):
            for i in range(steps):
                sum((p.float() * (i + 1)).square().sum() for p in params.values()).backward()
                optimizer.step(0.1)
                optimizer.zero_grad()
        second.load_state({k: v.clone() for k, v in first.state().items()})
        with torch.no_grad():
            for n, p in b.items():
                p.copy_(a[n])
        for optimizer, params in ((first, a), (second, b)):
            sum(p.float().square().sum() for p in params.values()).backward()
            optimizer.step(0.1)
        for n in a:
            assert torch.equal(a[n], b[n])


def test_overflowing_norm_is_refused() -> None:
    p = parameters(torch.float32)
    optimizer = MasterAdamW(p, OptimizerConfig())
    before = {n: x.detach().clone() for n, x in p.items()}
    for x in p.values():
        x.grad = torch.full_like(x, 3e38)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        optimizer.step(0.1)
    assert all(torch.equal(p[n], before[n]) for n in p)


def test_norm_of_nothing() -> None:
    assert float(global_norm([])) == 0.0


@given(st.integers(0, 200), st.integers(0, 20), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1))
def test_schedule(updates: int, warmup: int, kind: str, final: float) -> None:
    total = 100
    config = ScheduleConfig.model_validate(
        {"kind": kind, "warmup_steps": warmup, "total_steps": total, "final_factor": final}
    )
    got = factor(updates, config)
    if updates < warmup:
        assert got == (updates + 1) / warmup
    elif kind == "constant":
        assert got == 1.0
    else:
        x = min(1.0, (updates - warmup) / (total - warmup))
        shape = 1 - x if kind == "linear" else (1 + math.cos(math.pi * x)) / 2
        assert got == pytest.approx(final + (1 - final) * shape)
        assert min(final, 1.0) - 1e-12 <= got <= 1.0


def test_schedule_ends_where_it_says() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=2, total_steps=10, final_factor=0.1)
    assert [round(factor(i, config), 4) for i in (0, 1, 2, 6, 10, 50)] == [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
