"""Token losses, corrections and KL estimates against formulas written out one token at a time in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles_trainer.config import KlEstimator, ObjectiveConfig
from miles_trainer.loss import StepSums, micro_batch_loss
from miles_trainer.objectives import Tokens, correction_weights, kl_terms, policy_loss

SEGMENTS = [0, 0, 0, 1, 1, 3]  # trajectory 2 has no trained token
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5, 2.0]
NEW = [-1.0, -2.5, -0.3, -1.2, -0.7, -2.0]
OLD = [-1.3, -2.4, -0.9, -1.9, -0.2, -2.1]


def tensors(new: list[float] = NEW, old: list[float] = OLD) -> tuple[Tensor, Tokens]:
    f = {"dtype": torch.float64}
    n = len(new)
    tokens = Tokens(
        engine=torch.tensor(old, **f),
        advantages=torch.tensor(ADVANTAGES[:n], **f),
        weights=torch.full((n,), 1 / n, **f),
        segments=torch.tensor(SEGMENTS[:n]),
        num_segments=4,
    )
    return torch.tensor(new, **f, requires_grad=True), tokens


def objective(**values: Any) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(values)


def by_segment(values: list[float]) -> dict[int, list[float]]:
    out: dict[int, list[float]] = {}
    for s, v in zip(SEGMENTS, values, strict=True):
        out.setdefault(s, []).append(v)
    return out


def clipped(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
    loss = max(-ratio * a, -min(max(ratio, 1 - low), 1 + high) * a)
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


@pytest.mark.parametrize("dual", [None, 1.5])
def test_clip(dual: float | None) -> None:
    new, tokens = tensors()
    got = policy_loss(new, tokens, objective(clip_low=0.2, clip_high=0.28, dual_clip=dual))
    want = [clipped(math.exp(n - o), a, 0.2, 0.28, dual) for n, o, a in zip(NEW, OLD, ADVANTAGES, strict=True)]
    torch.testing.assert_close(got.loss.tolist(), want, rtol=1e-12, atol=0)
    # tokens 0 (1.35) and 2 (1.82) leave the band upwards with A > 0; token 4 falls below with A < 0;
    # token 3 has ratio 2.01 and A < 0, which only the dual clip bounds
    assert got.clipped.tolist() == [True, False, True, dual is not None, True, False]
    got.loss.sum().backward()
    gradient = [
        0.0 if c else -math.exp(n - o) * a
        for c, n, o, a in zip(got.clipped.tolist(), NEW, OLD, ADVANTAGES, strict=True)
    ]
    assert new.grad is not None
    torch.testing.assert_close(new.grad.tolist(), gradient, rtol=1e-12, atol=0)


def test_gspo() -> None:
    new, tokens = tensors()
    got = policy_loss(new, tokens, objective(kind="gspo", clip_low=0.3, clip_high=0.4))
    gaps = by_segment([n - o for n, o in zip(NEW, OLD, strict=True)])
    ratios = [math.exp(sum(gaps[s]) / len(gaps[s])) for s in SEGMENTS]
    want = [clipped(r, a, 0.3, 0.4, None) for r, a in zip(ratios, ADVANTAGES, strict=True)]
    torch.testing.assert_close(got.loss.tolist(), want, rtol=1e-12, atol=0)
    # gradient of a trajectory's loss spreads evenly over its tokens
    (grad,) = torch.autograd.grad(got.loss[3], new)
    torch.testing.assert_close(
        grad.tolist(), [0.0, 0.0, 0.0, 0.25 * ratios[3], 0.25 * ratios[3], 0.0], rtol=1e-12, atol=0
    )


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    new, tokens = tensors()
    got = policy_loss(new, tokens, objective(kind="cispo", clip_high=0.28))
    caps = [min(math.exp(n - o), 1.28) for n, o in zip(NEW, OLD, strict=True)]
    want = [-c * a * n for c, a, n in zip(caps, ADVANTAGES, NEW, strict=True)]
    torch.testing.assert_close(got.loss.tolist(), want, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(got.loss.sum(), new)
    torch.testing.assert_close(
        grad.tolist(), [-c * a for c, a in zip(caps, ADVANTAGES, strict=True)], rtol=1e-12, atol=0
    )


def test_sft_is_the_negative_logprob() -> None:
    new, tokens = tensors()
    got = policy_loss(new, tokens, objective(kind="sft"))
    torch.testing.assert_close(got.loss.tolist(), [-n for n in NEW])


def test_recomputed_old_policy_has_ratio_one_and_policy_gradient() -> None:
    new, tokens = tensors()
    got = policy_loss(new, tokens, objective(old_logprobs="recomputed"))
    assert got.loss.tolist() == [-a for a in ADVANTAGES]
    (grad,) = torch.autograd.grad(got.loss.sum(), new)
    assert grad.tolist() == [-a for a in ADVANTAGES]
    assert not got.clipped.any()


def weights_of(**values: Any) -> list[float]:
    new, tokens = tensors()
    cfg = objective(old_logprobs="recomputed", correction=values)
    out: list[float] = correction_weights(new.detach() - tokens.engine, tokens, cfg.correction).tolist()
    return out


RATIOS = [math.exp(n - o) for n, o in zip(NEW, OLD, strict=True)]  # 1.35 0.90 1.82 2.01 0.61 1.11


def test_truncated_importance_sampling() -> None:
    got = weights_of(kind="truncate", high=1.5)
    torch.testing.assert_close(got, [min(r, 1.5) for r in RATIOS], rtol=1e-12, atol=0)
    gaps = by_segment([n - o for n, o in zip(NEW, OLD, strict=True)])
    got = weights_of(kind="truncate", level="sequence", high=2.0)
    torch.testing.assert_close(got, [min(math.exp(sum(gaps[s])), 2.0) for s in SEGMENTS], rtol=1e-12, atol=0)
    got = weights_of(kind="truncate", level="geometric", high=1.2)
    want = [min(math.exp(sum(gaps[s]) / len(gaps[s])), 1.2) for s in SEGMENTS]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_clip_or_pop_zeroes_outside_the_band() -> None:
    got = weights_of(kind="pop", low=0.7, high=1.9)
    torch.testing.assert_close(got, [r if 0.7 <= r <= 1.9 else 0.0 for r in RATIOS], rtol=1e-12, atol=0)


def test_masking_drops_whole_trajectories() -> None:
    # sums of log-ratios: 0.8, 0.2, 0.1; means: 0.27, 0.1, 0.1
    assert weights_of(mask_level="sequence", mask_low=0.5, mask_high=2.0) == [0, 0, 0, 1, 1, 1]
    assert weights_of(mask_level="geometric", mask_low=0.5, mask_high=1.2) == [0, 0, 0, 1, 1, 1]
    assert weights_of(mask_level="geometric", mask_low=1.2, mask_high=1.5) == [1, 1, 1, 0, 0, 0]


def test_veto_drops_a_trajectory_with_one_impossible_token() -> None:
    assert weights_of(veto=0.7) == [1, 1, 1, 0, 0, 1]
    assert weights_of(veto=0.5) == [1] * 6


def test_corrections_multiply() -> None:
    got = weights_of(kind="truncate", high=1.5, veto=0.7)
    want = [min(r, 1.5) for r in RATIOS[:3]] + [0.0, 0.0, RATIOS[5]]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_correction_scales_loss_and_gradient() -> None:
    new, tokens = tensors()
    got = policy_loss(new, tokens, objective(old_logprobs="recomputed", correction={"kind": "truncate", "high": 1.5}))
    want = [-a * min(r, 1.5) for a, r in zip(ADVANTAGES, RATIOS, strict=True)]
    torch.testing.assert_close(got.loss.tolist(), want, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(got.loss.sum(), new)
    torch.testing.assert_close(grad.tolist(), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
    ],
)
def test_kl_estimators(estimator: str, formula: Any) -> None:
    d = [-2.0, -0.1, 0.0, 0.4, 3.0]
    got = kl_terms(torch.tensor(d, dtype=torch.float64), KlEstimator(estimator))
    torch.testing.assert_close(got.tolist(), [formula(x) for x in d], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator: str) -> None:
    # exactly, as an expectation over a whole distribution
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_terms((p / q).log(), KlEstimator(estimator))).sum(), exact)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-80, 0), min_size=6, max_size=6), st.lists(st.floats(-80, 0), min_size=6, max_size=6))
def test_extreme_gaps_stay_finite(new: list[float], old: list[float]) -> None:
    for kind in ("clip", "gspo", "cispo"):
        x, tokens = tensors(new, old)
        got = policy_loss(x.float(), tokens, objective(kind=kind, dual_clip=3.0))
        assert bool(torch.isfinite(got.loss).all())
        got.loss.sum().backward()
        assert x.grad is not None
        assert bool(torch.isfinite(x.grad).all())


def test_total_loss_and_metrics() -> None:
    new, tokens = tensors()
    reference = torch.tensor([-1.1, -2.0, -0.4, -1.0, -0.9, -2.2], dtype=torch.float64)
    entropy = torch.tensor([1.0, 2.0, 0.5, 0.1, 0.2, 0.3], dtype=torch.float64)
    cfg = objective(entropy_coefficient=0.1, kl={"coefficient": 0.05, "estimator": "k3"})
    sums = StepSums.zero(torch.device("cpu"))
    loss, _ = micro_batch_loss(new, entropy, reference, tokens, cfg, sums)
    pg = [clipped(r, a, 0.2, 0.28, None) for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    k3 = [math.exp(r - n) - 1 + n - r for n, r in zip(NEW, reference.tolist(), strict=True)]
    total = [p + 0.05 * k - 0.1 * h for p, k, h in zip(pg, k3, entropy.tolist(), strict=True)]
    assert loss.item() == pytest.approx(sum(total) / 6, rel=1e-12)
    metrics = sums.metrics(6, cfg)
    gap = [n - o for n, o in zip(NEW, OLD, strict=True)]
    assert metrics["loss"] == pytest.approx(sum(total) / 6)
    assert metrics["policy_loss"] == pytest.approx(sum(pg) / 6)
    assert metrics["entropy"] == pytest.approx(sum(entropy.tolist()) / 6)
    assert metrics["kl_reference"] == pytest.approx(sum(k3) / 6)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(sum(map(abs, gap)) / 6)
    assert metrics["train_rollout_logprob_abs_diff_max"] == pytest.approx(max(map(abs, gap)))
    assert metrics["train_rollout_kl"] == pytest.approx(sum(math.exp(g) - 1 - g for g in gap) / 6)
    assert metrics["ess_ratio"] == pytest.approx(sum(RATIOS) ** 2 / (6 * sum(r * r for r in RATIOS)))
    assert metrics["clip_fraction"] == pytest.approx(3 / 6)


def test_gap_metrics_do_not_depend_on_the_old_policy() -> None:
    values = []
    for old in ("engine", "recomputed"):
        new, tokens = tensors()
        sums = StepSums.zero(torch.device("cpu"))
        micro_batch_loss(new, None, None, tokens, objective(old_logprobs=old), sums)
        metrics = sums.metrics(6, objective(old_logprobs=old))
        values.append({k: metrics[k] for k in ("train_rollout_logprob_abs_diff", "train_rollout_kl", "ess_ratio")})
    assert values[0] == values[1]
    assert values[0]["train_rollout_kl"] > 0


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
def test_gradients_by_finite_differences(kind: str) -> None:
    # CISPO's weight and corrections are constants by definition, so they are held fixed for the differences
    torch.manual_seed(0)
    new, tokens = tensors()
    cfg = objective(kind=kind, dual_clip=3.0)
    (grad,) = torch.autograd.grad((policy_loss(new, tokens, cfg).loss * tokens.weights).sum(), new)
    for i in range(len(NEW)):
        step = 1e-6
        values = []
        for sign in (1, -1):
            x = new.detach().clone()
            x[i] += sign * step
            if kind == "cispo":
                caps = (new.detach() - tokens.engine).exp().clamp(max=1.28)
                loss = -caps * tokens.advantages * x
            else:
                loss = policy_loss(x, tokens, cfg).loss
            values.append(float((loss * tokens.weights).sum()))
        assert float(grad[i]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)
