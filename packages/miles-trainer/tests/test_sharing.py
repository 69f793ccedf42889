"""A prompt that is computed once for its whole group gives the same step as one computed for every member."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import Group, RoutingTrace, Trajectory
from miles_trainer import Trainer, TrainerConfig
from miles_trainer.attention import layout_of, varlen_attention
from miles_trainer.batching import build_micro_batch, plan
from miles_trainer.sharing import common_prefixes

Make = Callable[..., Trajectory]
Folder = Callable[..., Path]


def with_prefix(t: Trajectory, prefix: np.ndarray, routes: np.ndarray | None = None) -> Trajectory:
    """The trajectory with its first tokens (and their routes) replaced."""
    ids = t.token_ids.copy()
    ids[: len(prefix)] = prefix
    changes: dict[str, Any] = {"token_ids": ids}
    if t.routing is not None and routes is not None:
        experts = t.routing.expert_ids.astype(np.int64)
        experts[: len(routes)] = routes
        changes["routing"] = RoutingTrace.of(experts, t.routing.num_experts)
    return t.replace(**changes)


def shared_groups(make: Make, *, routing: tuple[int, int, int] | None = None, sizes: int = 4) -> list[Group]:
    """Groups whose members share prompts of 5, 7 and 9 tokens; one member ends right after its prompt."""
    rng = np.random.default_rng(0)
    groups = []
    for prompt, start in enumerate((5, 7, 9)):
        prefix = rng.integers(3, 61, start)
        routes = None
        if routing is not None:
            layers, top_k, experts = routing
            routes = np.argsort(rng.random((start, layers, experts)), axis=-1)[..., :top_k]
        members = [
            with_prefix(
                make(
                    prompt=prompt, member=m, total=start + 1 + 3 * m, start=start, reward=float(m % 2), routing=routing
                ),
                prefix,
                routes,
            )
            for m in range(sizes)
        ]
        groups.append(Group(prompt_index=prompt, size=sizes, trajectories=tuple(members)))
    return groups


def step(folder: Path, groups: list[Group], *, share: bool, **config: Any) -> tuple[dict[str, float], dict[str, Any]]:
    batching = {"share_prefixes": share, **config.pop("batching", {})}
    trainer = Trainer(folder, TrainerConfig.model_validate({"batching": batching, **config}), seed=0)
    seen: dict[str, torch.Tensor] = {}
    optimizer = trainer.backend.optimizer
    update = optimizer.step

    def watch(lr: float) -> float:
        seen.update({n: g.clone() for n, g in optimizer.gradients().items()})
        return update(lr)

    optimizer.step = watch  # type: ignore[method-assign]
    return trainer.train_step(groups), seen


@pytest.mark.parametrize(
    ("family", "routing"),
    [
        ("qwen3", None),
        ("mistral", None),
        ("gemma2", None),
        ("qwen3_moe", (2, 2, 6)),
        ("deepseek_v3", (2, 2, 8)),
        ("gpt_oss", (2, 2, 6)),
    ],
)
@pytest.mark.parametrize("max_tokens", [10_000, 70])
def test_step_is_the_same(
    family: str, routing: tuple[int, int, int] | None, max_tokens: int, model_folder: Folder, make_trajectory: Make
) -> None:
    folder = model_folder(family, dtype="float64")
    groups = shared_groups(make_trajectory, routing=routing)
    together, got = step(folder, groups, share=True, batching={"max_tokens": max_tokens})
    apart, want = step(folder, groups, share=False)
    assert together["tokens_fed"] < 0.75 * apart["tokens_fed"]
    for key, value in apart.items():
        if key not in ("tokens_fed", "micro_batches", "router_agreement"):
            # parts of some families are float32 whatever the model's dtype
            assert together[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for name, gradient in want.items():
        scale = float(gradient.abs().max()) + 1e-9
        torch.testing.assert_close(got[name] / scale, gradient / scale, rtol=0, atol=2e-5, msg=name)


def test_scores_are_the_same(model_folder: Folder, make_trajectory: Make) -> None:
    flat = [t for g in shared_groups(make_trajectory) for t in g]
    scores = []
    for share in (True, False):
        config = TrainerConfig.model_validate({"batching": {"share_prefixes": share}})
        scores.append(Trainer(model_folder("qwen3"), config, seed=0).score(flat))
    for a, b in zip(*scores, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layout_of_a_shared_prompt(make_trajectory: Make) -> None:
    (group, *_) = shared_groups(make_trajectory, sizes=3)
    other = make_trajectory(prompt=9, total=6, start=4)
    members = [*group, other]
    micro = build_micro_batch(members, np.ones(4), np.ones(4), share=True)
    chunks = micro.chunks
    # members feed 5, 8 and 11 tokens, of which 5 are common; the first has nothing of its own
    assert chunks.owner.tolist() == [0, 1, 2, 3, 0]
    assert chunks.start.tolist() == [5, 5, 5, 0, 0]
    assert chunks.length.tolist() == [0, 3, 6, 5, 5]
    assert chunks.prefix.tolist() == [4, 4, 4, -1, -1]
    prompt = group.trajectories[0].token_ids[:5].tolist()
    want = [*members[1].token_ids[5:8], *members[2].token_ids[5:11], *other.token_ids[:5], *prompt]
    assert micro.token_ids.tolist() == want
    assert micro.position_ids.tolist() == [5, 6, 7, *range(5, 11), *range(5), *range(5)]
    # the first sampled token of each member is predicted by the last token of the prompt
    assert micro.sources.tolist() == [18, 18, 0, 1, 2, 18, 3, 4, 5, 6, 7, 8, 12, 13]
    for source, target_index in zip(micro.sources, micro.target_index, strict=True):
        assert micro.position_ids[source] == target_index - 1


def test_what_is_shared(make_trajectory: Make) -> None:
    (group, *_) = shared_groups(make_trajectory, routing=(2, 2, 6), sizes=3)
    a, b, c = group
    fed = np.array([5, 8, 11])
    lengths, leaders = common_prefixes([a, b, c], fed)
    assert (lengths.tolist(), leaders.tolist()) == ([5, 5, 5], [0, 0, 0])
    # other routes, a missing trace, too short a prefix or another prompt: nothing in common
    assert b.routing is not None
    turned = RoutingTrace.of(b.routing.expert_ids[:, :, ::-1].astype(np.int64), 6)
    for changed in (b.replace(routing=turned), b.replace(routing=None), with_prefix(b, np.array([1, 1, 1, 60]))):
        assert common_prefixes([a, changed, c], fed)[0].tolist() == [0, 0, 0]
    moved = b.replace(identity=type(b.identity)(prompt_index=5, member=1))
    assert common_prefixes([a, moved, c], fed)[0].tolist() == [5, 0, 5]
    # long rows would need a large mask
    long = make_trajectory(total=2000, start=1500)
    assert common_prefixes([long, long], np.array([1999, 1999]))[0].tolist() == [0, 0]


def test_prompts_stay_together_while_they_fit(make_trajectory: Make) -> None:
    flat = [t for g in shared_groups(make_trajectory) for t in g]
    for b in plan(flat, 60, padded=False):
        assert len({flat[i].identity.prompt_index for i in b}) == 1
    alone = plan(flat, 20, padded=False)
    assert sorted(i for b in alone for i in b) == list(range(12))


def test_load_balancing_counts_every_prompt(model_folder: Folder, make_trajectory: Make) -> None:
    groups = shared_groups(make_trajectory, routing=(2, 2, 6))
    metrics = [
        step(model_folder("qwen3_moe"), groups, share=share, replay={"aux_loss_coefficient": 1.0})[0]
        for share in (True, False)
    ]
    assert metrics[0] == metrics[1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 1)), min_size=1, max_size=7),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.sampled_from([None, 2, 5]),
    st.booleans(),
)
def test_attention_over_shared_prefixes(
    rows: list[tuple[int, int]], prefixes: tuple[int, int], window: int | None, with_sinks: bool
) -> None:
    torch.manual_seed(0)
    lengths = np.array([n for n, _ in rows] + list(prefixes))
    prefix = np.array([p if p < 0 else len(rows) + p for _, p in rows] + [-1, -1])
    starts = np.cumsum(lengths) - lengths
    total, heads, d = int(lengths.sum()), 2, 3
    q, k, v = (torch.randn(1, heads, total, d, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(heads, dtype=torch.float64) if with_sinks else None
    out, _ = varlen_attention(
        torch.nn.Identity(), q, k, v, None,
        miles_layout=layout_of(lengths, torch.device("cpu"), prefix), sliding_window=window, s_aux=sinks,
    )  # fmt: skip
    for c, n in enumerate(lengths.tolist()):
        root = int(prefix[c])
        context = list(range(starts[root], starts[root] + lengths[root])) if root >= 0 else []
        for i in range(n):
            keys = [*context, *range(starts[c], starts[c] + i + 1)]
            keys = keys[-window:] if window else keys
            for h in range(heads):
                weights = (q[0, h, starts[c] + i] @ k[0, h, keys].T * d**-0.5).exp()
                norm = weights.sum() + (sinks[h].exp() if sinks is not None else 0)
                torch.testing.assert_close(out[0, starts[c] + i, h], weights @ v[0, h, keys] / norm)
