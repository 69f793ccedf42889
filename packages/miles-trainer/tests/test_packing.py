"""Packing changes nothing: every family's packed log-probs and gradients are those of lone trajectories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles_contracts import InvalidFieldError, Trajectory
from miles_trainer import attention
from miles_trainer.attention import UnsupportedAttentionError, layout_of, varlen_attention
from miles_trainer.batching import build_micro_batch
from miles_trainer.modeling import Packing, PolicyModel, load_model

PACKED = [
    "qwen3", "llama", "mistral", "gemma2", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "minimax_m2",
]  # fmt: skip
PADDED = ["qwen3_next", "qwen3_5_text", "nemotron_h", "lfm2"]
CPU = torch.device("cpu")


def lone_logprobs(folder: Path, trajectories: list[Trajectory]) -> tuple[Tensor, Any]:
    """Plain forward of each trajectory by itself with the family's own attention."""
    model = load_model(folder, "auto", CPU)
    out = []
    for t in trajectories:
        ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
        table = model(ids, use_cache=False).logits[0].log_softmax(-1)
        out.append(table[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(out), model


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_packed_logprobs_and_gradients_equal_lone_ones(
    family: str, model_folder: Callable[..., Path], make_trajectory: Callable[..., Trajectory]
) -> None:
    folder = model_folder(family, dtype="float64")
    trajectories = [make_trajectory(member=i, total=n, start=2) for i, n in enumerate((9, 14, 2, 11, 9))]
    policy = PolicyModel(load_model(folder, "auto", CPU), packing="auto", logits_bytes=1 << 20)
    assert policy.packing is (Packing.PADDED if family in PADDED else Packing.VARLEN)
    got, _ = policy.forward(build_micro_batch(trajectories))
    want, model = lone_logprobs(folder, trajectories)
    torch.testing.assert_close(
        got, want, rtol=0, atol=1e-6, check_dtype=False
    )  # some families compute parts in float32
    got.square().sum().backward()
    want.square().sum().backward()
    theirs = dict(model.named_parameters())
    for name, p in policy.model.named_parameters():
        if theirs[name].grad is None:
            assert p.grad is None or not p.grad.any()
            continue
        scale = float(theirs[name].grad.abs().max()) + 1e-6
        torch.testing.assert_close(p.grad / scale, theirs[name].grad / scale, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("packing", ["block_diagonal", "padded"])
def test_other_layouts_agree_too(
    packing: str, model_folder: Callable[..., Path], make_trajectory: Callable[..., Trajectory]
) -> None:
    folder = model_folder("qwen3")
    trajectories = [make_trajectory(member=i, total=n, start=2) for i, n in enumerate((9, 14, 2))]
    policy = PolicyModel(load_model(folder, "float32", CPU), packing=packing, logits_bytes=1 << 20)
    got, _ = policy.forward(build_micro_batch(trajectories))
    want, _ = lone_logprobs(folder, trajectories)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_a_leak_between_trajectories_is_noticed(model_folder: Callable[..., Path]) -> None:
    # this family builds its masks without looking at position ids, so transformers' own packing mixes neighbours
    model = load_model(model_folder("gpt_oss"), "float32", CPU)
    with pytest.raises(InvalidFieldError, match=r"batching\.packing.*mixes packed trajectories"):
        PolicyModel(model, packing="block_diagonal", logits_bytes=1 << 20)


def test_recurrent_layers_refuse_packing(model_folder: Callable[..., Path]) -> None:
    model = load_model(model_folder("qwen3_next"), "float32", CPU)
    with pytest.raises(InvalidFieldError, match="allows padded at best"):
        PolicyModel(model, packing="varlen", logits_bytes=1 << 20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_layout_holds_every_token_once(lengths: list[int]) -> None:
    total = sum(lengths)
    layout = layout_of(np.array(lengths, dtype=np.int64), CPU)
    if total == 0:
        assert layout.rectangles == ()
        return
    flat = torch.cat([box.queries for box in layout.rectangles])
    assert torch.equal(flat[layout.scatter], torch.arange(total))
    assert sum(box.rows for box in layout.rectangles) == sum(n > 0 for n in lengths)
    assert len(flat) <= total / 0.75 + 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([None, 1, 3, 20]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
def test_varlen_attention_equals_a_written_out_softmax(
    lengths: list[int], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    torch.manual_seed(len(lengths))
    total, heads, kv_heads, d = sum(lengths), 4, 2, 3
    q = torch.randn(1, heads, total, d, dtype=torch.float64)
    k, v = (torch.randn(1, kv_heads, total, d, dtype=torch.float64) for _ in range(2))
    sinks = torch.randn(heads, dtype=torch.float64) if with_sinks else None
    out, _ = varlen_attention(
        torch.nn.Identity(), q, k, v, None, scaling=0.7,
        miles_layout=layout_of(np.array(lengths), CPU), sliding_window=window, softcap=softcap, s_aux=sinks,
    )  # fmt: skip
    start = 0
    for n in lengths:
        for i in range(n):
            for h in range(heads):
                first = max(0, i - window + 1) if window else 0
                keys = range(start + first, start + i + 1)
                scores = torch.stack([0.7 * q[0, h, start + i] @ k[0, h // 2, j] for j in keys])
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                norm = weights.sum() + (sinks[h].exp() if sinks is not None else 0)
                want = (weights[:, None] * torch.stack([v[0, h // 2, j] for j in keys])).sum(0) / norm
                torch.testing.assert_close(out[0, start + i, h], want, rtol=1e-9, atol=1e-9)
        start += n


def test_attention_refuses_what_it_does_not_compute() -> None:
    x = torch.zeros(1, 2, 3, 4)
    layout = layout_of(np.array([3]), CPU)
    with pytest.raises(UnsupportedAttentionError, match="keyword arguments"):
        varlen_attention(torch.nn.Identity(), x, x, x, None)
    for extra in ({"attention_mask": torch.ones(1, 1, 3, 3)}, {"attention_mask": None, "dropout": 0.1}):
        with pytest.raises(UnsupportedAttentionError, match="mask nor dropout"):
            varlen_attention(torch.nn.Identity(), x, x, x, **extra, miles_layout=layout)
    for name, value in (("position_bias", x), ("is_causal", False)):
        with pytest.raises(UnsupportedAttentionError):
            varlen_attention(torch.nn.Identity(), x, x, x, None, miles_layout=layout, **{name: value})
    two = x.expand(2, -1, -1, -1)
    with pytest.raises(UnsupportedAttentionError, match="one row"):
        varlen_attention(torch.nn.Identity(), two, two, two, None, miles_layout=layout)


def test_capped_logits_take_the_dense_path(
    model_folder: Callable[..., Path], make_trajectory: Callable[..., Trajectory]
) -> None:
    policy = PolicyModel(load_model(model_folder("gemma2"), "float32", CPU), packing="auto", logits_bytes=1 << 20)
    assert not policy.plain_head
    plain = PolicyModel(load_model(model_folder("qwen3"), "float32", CPU), packing="auto", logits_bytes=1 << 20)
    assert plain.plain_head
    _, entropy = policy.forward(build_micro_batch([make_trajectory()]), entropy=True)
    assert entropy is not None
    assert bool((entropy > 0).all())


def test_registration_is_idempotent() -> None:
    attention.register()
    attention.register()
