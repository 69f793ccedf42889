"""Routing replay against models whose routes are fixed by other means, in float64, for every family."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from miles_contracts import Group, InvalidFieldError, RoutingTrace, Trajectory
from miles_trainer import Trainer, TrainerConfig
from miles_trainer.batching import build_micro_batch
from miles_trainer.modeling import PolicyModel, load_model
from miles_trainer.replay import Replayer, find_routers

Folder = Callable[..., Path]
Groups = Callable[..., list[Group]]
CPU = torch.device("cpu")
# family -> MoE layers, top-k, experts
SHAPES = {
    "qwen3_moe": (2, 2, 6),
    "mixtral": (2, 2, 6),
    "glm4_moe": (2, 2, 8),
    "deepseek_v3": (2, 2, 8),
    "gpt_oss": (2, 2, 6),
    "minimax_m2": (2, 2, 6),
    "qwen3_next": (4, 2, 6),
    "nemotron_h": (2, 2, 8),
    "deepseek_v32": (2, 2, 8),
    "deepseek_v4": (3, 2, 8),
    "glm_moe_dsa": (2, 2, 8),
    "qwen3_5_moe_text": (4, 2, 6),
    "gemma4_text": (2, 2, 6),
    "glm4_moe_lite": (2, 2, 8),
    "hunyuan_v1_moe": (2, 2, 6),
    "afmoe": (2, 2, 6),
    "mimo_v2_flash": (2, 2, 8),
}
# routers that differ from those of another family in nothing that replay sees
ALIKE = ("mixtral", "nemotron_h", "glm4_moe_lite", "afmoe", "mimo_v2_flash")
EVERY = [pytest.param(f, marks=pytest.mark.gate) if f in ALIKE else f for f in SHAPES]
# layers whose experts depend on the token id alone: there is nothing to replay
TABLES = {"deepseek_v4": 1}


def build(folder: Path, **config: Any) -> Trainer:
    return Trainer(folder, TrainerConfig.model_validate(config), seed=0)


def gate_weights(family: str, config: Any, scores_in: Tensor, ids: Tensor) -> Tensor:
    """Weights of the given experts as each family's paper defines them; independent of the model's code."""
    if family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "hunyuan_v1_moe"):
        chosen = scores_in.softmax(-1).gather(1, ids)
        return chosen / chosen.sum(-1, keepdim=True)
    if family == "gpt_oss":
        return scores_in.gather(1, ids).softmax(-1)
    if family == "deepseek_v4":
        chosen = torch.log1p(scores_in.exp()).sqrt().gather(1, ids)
    else:
        chosen = scores_in.sigmoid().gather(1, ids)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    scale = {"minimax_m2": 1.0, "afmoe": getattr(config, "route_scale", 1.0)}
    return chosen * scale.get(family, getattr(config, "routed_scaling_factor", None) or 1.0)


class FixedRouter(nn.Module):
    """Stands in for a router: its own linear map, hand-written gate weights, and routes that never change."""

    def __init__(self, family: str, config: Any, router: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.family, self.config, self.ids = family, config, ids
        # under the names that the router's own parameters have
        for name, value in (*router.named_parameters(recurse=False), *router.named_children()):
            setattr(self, name, value)

    def forward(self, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        (matrix,) = [p for p in self.parameters() if p.dim() == 2]
        # some families keep their routers in float32
        flat = hidden.reshape(-1, hidden.shape[-1]).to(matrix.dtype)
        if self.family == "gemma4_text":
            flat = flat * flat.square().mean(-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
            flat = flat * self.scale * flat.shape[-1] ** -0.5
            logits = torch.nn.functional.linear(flat, matrix)
            chosen = logits.softmax(-1).gather(1, self.ids)
            chosen = chosen / chosen.sum(-1, keepdim=True) * self.per_expert_scale[self.ids]
            return logits.softmax(-1), chosen, self.ids
        logits = torch.nn.functional.linear(flat, matrix, getattr(self, "bias", None))
        return logits, gate_weights(self.family, self.config, logits, self.ids), self.ids


def fixed_route_model(folder: Path, family: str, t: Trajectory) -> Any:
    model = load_model(folder, "auto", CPU)
    assert t.routing is not None
    for index, router in enumerate(find_routers(model)):
        if index < TABLES.get(family, 0):
            continue
        parent, _, child = router.name.rpartition(".")
        ids = torch.from_numpy(t.routing.expert_ids[:, index].astype(np.int64))
        setattr(model.get_submodule(parent), child, FixedRouter(family, model.config, router.module, ids))
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", EVERY)
def test_forward_and_gradients_equal_a_model_with_fixed_routes(
    family: str, checkpointing: bool, model_folder: Folder, make_trajectory: Callable[..., Trajectory]
) -> None:
    folder = model_folder(family, dtype="float64")
    trajectories = [make_trajectory(member=i, total=n, start=2, routing=SHAPES[family]) for i, n in enumerate((9, 14))]
    trainer = build(folder, gradient_checkpointing=checkpointing)
    policy, replayer = trainer.backend.policy, trainer.backend.replayer
    assert replayer is not None
    micro = build_micro_batch(trajectories)
    rows, num_rows = policy.input_rows(micro)
    with replayer.using(replayer.prepare(micro, rows, num_rows, replay=True)) as use:
        got, _ = policy.forward(micro)
        got.square().sum().backward()
    assert use.replayed == micro.num_tokens * (SHAPES[family][0] - TABLES.get(family, 0))
    want, gradients = [], {}
    for t in trajectories:
        model = fixed_route_model(folder, family, t)
        ids = torch.from_numpy(t.token_ids.astype(np.int64))
        table = model(ids[None, :-1], use_cache=False).logits[0].double().log_softmax(-1)
        logprobs = table.gather(1, ids[1:, None])[:, 0]
        want.append(logprobs.detach())
        logprobs.square().sum().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradients[name] = gradients.get(name, 0) + p.grad
    # routers of some families compute in float32 whatever the model's dtype
    torch.testing.assert_close(got.detach(), torch.cat(want), rtol=0, atol=2e-5)
    routers = {f"{r.name}.{n}" for r in replayer.routers for n, p in r.module.named_parameters() if p.dim() == 2}
    assert routers <= gradients.keys()
    for name, p in policy.model.named_parameters():
        if name not in gradients:
            assert p.grad is None or not p.grad.any(), name
            continue
        scale = float(gradients[name].abs().max())
        assert scale > 0
        torch.testing.assert_close(p.grad / scale, gradients[name] / scale, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", EVERY)
def test_every_recorded_choice_is_used(
    family: str, model_folder: Folder, make_trajectory: Callable[..., Trajectory]
) -> None:
    trainer = build(model_folder(family))
    policy, replayer = trainer.backend.policy, trainer.backend.replayer
    assert replayer is not None
    micro = build_micro_batch(
        [make_trajectory(member=i, total=n, routing=SHAPES[family]) for i, n in enumerate((7, 12))]
    )
    rows, num_rows = policy.input_rows(micro)
    experts: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        experts.append(next(a for a in args if isinstance(a, Tensor) and not a.is_floating_point()))

    for router in replayer.routers:
        block: Any = policy.model.get_submodule(router.name.rpartition(".")[0])
        block.experts.register_forward_pre_hook(record)
    with replayer.using(replayer.prepare(micro, rows, num_rows, replay=True)), torch.no_grad():
        policy.forward(micro)
    assert len(experts) == SHAPES[family][0]
    for index, used in enumerate(experts):
        if index < TABLES.get(family, 0):
            continue
        np.testing.assert_array_equal(used[rows].numpy(), replayer.recorded_ids(micro)[index])


def own_routes(trainer: Trainer, t: Trajectory) -> RoutingTrace:
    """The routes that the trainer itself would take."""
    replayer, policy = trainer.backend.replayer, trainer.backend.policy
    assert replayer is not None
    micro = build_micro_batch([t])
    rows, num_rows = policy.input_rows(micro)
    with replayer.using(replayer.prepare(micro, rows, num_rows, replay=False)) as use, torch.no_grad():
        policy.forward(micro)
    nothing = torch.zeros(micro.num_tokens, replayer.top_k, dtype=torch.int64)
    ids = torch.stack(
        [use.chosen[i][rows] if i in use.chosen else nothing for i in range(len(replayer.routers))], dim=1
    )
    return RoutingTrace.of(ids.numpy(), replayer.routers[0].num_experts)


@pytest.mark.parametrize("family", EVERY)
def test_replaying_ones_own_routes_changes_nothing(family: str, model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder(family), optimizer={"lr": 0.0})
    groups = make_groups(num=1, size=3)
    routed = [
        Group(
            prompt_index=g.prompt_index,
            size=g.size,
            trajectories=tuple(t.replace(routing=own_routes(trainer, t)) for t in g),
        )
        for g in groups
    ]
    metrics = trainer.train_step(routed)
    assert metrics["router_agreement"] == 1.0
    assert metrics["replayed_fraction"] == 1.0
    assert metrics["routing_bytes"] == sum(t.routing.num_bytes for g in routed for t in g if t.routing)
    assert metrics["routing_packed_bytes"] == sum(t.routing.pack().nbytes for g in routed for t in g if t.routing)
    assert trainer.timings["replay_s"] > 0
    off = build(model_folder(family), optimizer={"lr": 0.0}, replay={"enabled": False}).train_step(groups)
    assert metrics["loss"] == pytest.approx(off["loss"], abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(off["grad_norm"], rel=1e-4)
    for plain, replayed in zip(
        build(model_folder(family)).score(list(groups[0])), trainer.score(list(routed[0])), strict=True
    ):
        np.testing.assert_allclose(plain[1:], replayed[1:], atol=1e-5)


def test_agreement_counts_equal_choices(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3_moe"), optimizer={"lr": 0.0})
    (group,) = make_groups(num=1, size=2)
    members, shares = [], []
    for t in group:
        own = own_routes(trainer, t).expert_ids.astype(np.int64)
        changed = own.copy()
        # in the first layer, one of the two experts becomes one that was not chosen
        for row in changed[:, 0]:
            row[1] = next(e for e in range(6) if e not in row)
        members.append(t.replace(routing=RoutingTrace.of(changed, 6)))
        shares.append(len(own) - 1 if t.loss_mask[-1] else len(own))
    metrics = trainer.train_step([Group(prompt_index=0, size=2, trajectories=tuple(members))])
    # half of the first layer's choices differ; the second layer sees changed inputs, so it is only bounded
    assert 0.25 <= metrics["router_agreement"] < 1.0
    first = trainer.backend.replayer
    assert first is not None
    micro = build_micro_batch(members)
    rows, num_rows = trainer.backend.policy.input_rows(micro)
    with first.using(first.prepare(micro, rows, num_rows, replay=True)) as use, torch.no_grad():
        trainer.backend.policy.forward(micro)
    own_second = 0.0
    assert use.replayed == 2 * micro.num_tokens
    own_second = float(use.agreement) - 0.5 * micro.num_tokens
    assert 0 <= own_second <= micro.num_tokens


def said_in_bfloat16(folder: Path, groups: list[Group]) -> list[Group]:
    """The groups with the log-probs, and the routes if there are routers, of a bfloat16 'engine'."""
    engine = build(folder, dtype="bfloat16", replay={"enabled": False})
    members = []
    for g in groups:
        scores = engine.score(list(g))
        members.append(
            Group(
                prompt_index=g.prompt_index,
                size=g.size,
                trajectories=tuple(
                    t.replace(
                        logprobs=np.where(np.isnan(t.logprobs), np.nan, np.minimum(s, 0)).astype(np.float32),
                        routing=own_routes(engine, t) if engine.backend.replayer is not None else None,
                    )
                    for t, s in zip(g, scores, strict=True)
                ),
            )
        )
    return members


def test_replay_closes_the_gap_that_bfloat16_routing_opens(model_folder: Folder, make_groups: Groups) -> None:
    """A bfloat16 'engine' and a float32 trainer: with its routes the gap shrinks to that of rounding alone, which is
    what a dense model of as many parameters a token, or in all, has."""
    folder = model_folder("qwen3_moe", num_experts=32, num_experts_per_tok=2)
    groups = make_groups(num=4, size=6, longest=40)
    members = said_in_bfloat16(folder, groups)
    on = build(folder, dtype="float32").train_step(members)
    off = build(folder, dtype="float32", replay={"enabled": False}).train_step(members)
    assert 0.9 < on["router_agreement"] < 1.0
    assert on["train_rollout_kl"] < 0.1 * off["train_rollout_kl"]
    assert on["train_rollout_logprob_abs_diff_max"] < 0.5 * off["train_rollout_logprob_abs_diff_max"]
    for inner in (32, 512):
        dense = model_folder("qwen3", intermediate_size=inner)
        plain = build(dense, dtype="float32").train_step(said_in_bfloat16(dense, groups))
        # the mean: KL hangs on the one token whose hidden state rounding moved furthest
        assert on["train_rollout_logprob_abs_diff"] < 1.3 * plain["train_rollout_logprob_abs_diff"]


def test_traces_over_all_decoder_layers(model_folder: Folder, make_groups: Groups) -> None:
    # the first of three layers is dense; some engines list it anyway
    groups = make_groups(num=1, size=3, routing=(3, 2, 8))
    wide = build(model_folder("glm4_moe")).train_step(groups)
    narrow_groups = [
        Group(
            prompt_index=0,
            size=3,
            trajectories=tuple(
                t.replace(routing=RoutingTrace.of(t.routing.expert_ids[:, 1:].astype(np.int64), 8))
                for t in groups[0]
                if t.routing
            ),
        )
    ]
    narrow = build(model_folder("glm4_moe")).train_step(narrow_groups)
    assert wide["loss"] == narrow["loss"]


def test_incomplete_routes_are_refused_or_left_out(model_folder: Folder, make_groups: Groups) -> None:
    (group,) = make_groups(num=1, size=4, routing=(2, 2, 6))
    lost = tuple(t.replace(routing=None) if t.identity.member == 2 else t for t in group)
    torn = Group(prompt_index=0, size=4, trajectories=lost)
    trainer = build(model_folder("qwen3_moe"))
    with pytest.raises(InvalidFieldError, match=r"routing of prompt 0 member 2.*replay\.incomplete to 'mask'"):
        trainer.train_step([torn])
    assert trainer.version == 0
    masked = build(model_folder("qwen3_moe"), replay={"incomplete": "mask"})
    metrics = masked.train_step([torn])
    assert metrics["excluded_unrouted"] == 1
    assert metrics["trajectories"] == 3
    assert metrics["reward"] == pytest.approx(np.mean([t.reward for t in group]))
    nothing = Group(prompt_index=0, size=4, trajectories=tuple(t.replace(routing=None) for t in group))
    with pytest.raises(InvalidFieldError, match="4 without routes"):
        masked.train_step([nothing])


@pytest.mark.parametrize("shape", [(1, 2, 6), (2, 3, 6), (2, 2, 7)])
def test_routes_of_another_model_are_refused(
    shape: tuple[int, int, int], model_folder: Folder, make_groups: Groups
) -> None:
    trainer = build(model_folder("qwen3_moe"), replay={"incomplete": "mask"})
    with pytest.raises(InvalidFieldError, match=r"routing of prompt 0 member 0.*2 routers with top-2 of \[6\]"):
        trainer.train_step(make_groups(routing=shape))


def test_turning_replay_off_warns_for_mixtures_only(model_folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="miles_trainer.backend"):
        build(model_folder("qwen3"), replay={"enabled": False})
        build(model_folder("qwen3_moe"))
        assert "replay.enabled is off" not in caplog.text
        build(model_folder("qwen3_moe"), replay={"enabled": False})
    assert "replay.enabled is off" in caplog.text


KINDS = {"qwen3_moe": "softmax", "deepseek_v3": "sigmoid", "deepseek_v4": "sqrtsoftplus", "gemma4_text": "normalised"}


def reference_aux(trainer: Trainer, family: str, groups: list[Group], counts: list[np.ndarray]) -> float:
    """Switch load-balancing loss of the whole step from router logits of lone forward passes."""
    replayer, policy = trainer.backend.replayer, trainer.backend.policy
    assert replayer is not None
    scores: list[list[Tensor]] = [[] for _ in replayer.routers]
    for g in groups:
        for t in g:
            micro = build_micro_batch([t], np.ones(1), np.ones(1))
            rows, num_rows = policy.input_rows(micro)
            with replayer.using(replayer.prepare(micro, rows, num_rows, replay=True)) as use, torch.no_grad():
                policy.forward(micro)
            for i in range(TABLES.get(family, 0), len(replayer.routers)):
                logits = use.logits[i][rows].double()
                p = {
                    "sigmoid": torch.sigmoid,
                    "softmax": lambda x: x.softmax(-1),
                    "sqrtsoftplus": lambda x: torch.log1p(x.exp()).sqrt(),
                    "normalised": lambda x: x,
                }[KINDS[family]](logits)
                scores[i].append(p / p.sum(-1, keepdim=True))
    losses = []
    for i in range(TABLES.get(family, 0), len(scores)):
        p = torch.cat(scores[i]).mean(0).numpy()
        losses.append(len(p) * float((p * counts[i] / counts[i].sum()).sum()))
    return float(np.mean(losses))


@pytest.mark.parametrize("family", list(KINDS))
@pytest.mark.parametrize("enabled", [True, False])
def test_aux_loss_counts_the_choices_used_in_the_whole_step(
    family: str, enabled: bool, model_folder: Folder, make_groups: Groups
) -> None:
    routing = SHAPES[family]
    groups = make_groups(num=2, size=3, routing=routing)
    plain = build(model_folder(family), optimizer={"lr": 0.0})
    if not enabled:
        groups = [
            Group(
                prompt_index=g.prompt_index,
                size=g.size,
                trajectories=tuple(t.replace(routing=own_routes(plain, t)) for t in g),
            )
            for g in groups
        ]
    counts = [np.zeros(routing[2]) for _ in range(routing[0])]
    for g in groups:
        for t in g:
            assert t.routing is not None
            fed = int(np.flatnonzero(t.loss_mask)[-1])
            for i in range(routing[0]):
                counts[i] += np.bincount(t.routing.expert_ids[:fed, i].reshape(-1), minlength=routing[2])
    want = reference_aux(plain, family, groups, counts)
    losses = {}
    for tokens in (10_000, 30):
        trainer = build(
            model_folder(family),
            replay={"aux_loss_coefficient": 20.0, "enabled": enabled},
            batching={"max_tokens": tokens},
        )
        metrics = trainer.train_step(groups)
        losses[tokens] = metrics["grad_norm"]
        assert metrics["aux_loss"] == pytest.approx(want, rel=1e-4)
    assert losses[30] == pytest.approx(losses[10_000], rel=1e-3)
    without = build(model_folder(family), replay={"enabled": enabled}).train_step(groups)
    assert losses[30] != pytest.approx(without["grad_norm"], rel=1e-3)


def test_checkpointed_aux_loss_is_the_same(model_folder: Folder, make_groups: Groups) -> None:
    groups = make_groups(num=1, size=3, routing=(2, 2, 6))
    results = []
    for checkpointing in (False, True):
        trainer = build(
            model_folder("qwen3_moe"),
            replay={"aux_loss_coefficient": 0.5},
            gradient_checkpointing=checkpointing,
        )
        results.append(trainer.train_step(groups))
    assert results[0] == results[1]


class OddRouter(nn.Module):
    """Chooses by argmax: nothing that replay could take over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x.reshape(-1, 8) @ self.weight.T
        return logits, logits.argmax(-1, keepdim=True)


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = OddRouter()
        self.experts = nn.Module()
        self.experts.stack = nn.Parameter(torch.randn(4, 8, 8))


def test_routers_that_cannot_be_replayed_are_refused(model_folder: Folder) -> None:
    model = OddModel()
    assert [r.name for r in find_routers(model)] == [".router"]
    model.config = load_model(model_folder("qwen3"), "auto", CPU).config
    with pytest.raises(InvalidFieldError, match="does not choose by top-k"):
        Replayer(model, lambda: model.router(torch.randn(3, 8)))
    with pytest.raises(InvalidFieldError, match="without routers"):
        Replayer(load_model(model_folder("qwen3"), "auto", CPU), lambda: None)


def test_a_mixture_whose_routers_are_not_found_is_refused(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Never taken for a dense model, whose routes nobody would miss."""
    monkeypatch.setattr("miles_trainer.backend.find_routers", lambda model: [])
    with pytest.raises(InvalidFieldError, match=r"replay\.enabled.*no router for its 6 experts"):
        build(model_folder("qwen3_moe"))
    with caplog.at_level(logging.WARNING, logger="miles_trainer.backend"):
        build(model_folder("qwen3_moe"), replay={"enabled": False})
    assert "replay.enabled is off" in caplog.text
    build(model_folder("qwen3"))


def test_dense_models_have_no_routers(model_folder: Folder) -> None:
    # the last two have convolutions, whose kernels have three dimensions like stacked experts
    for family in ("qwen3", "llama", "gemma2", "qwen3_5_text", "lfm2"):
        assert find_routers(load_model(model_folder(family), "auto", CPU)) == []


def test_nothing_is_replayed_outside_the_block(
    model_folder: Folder, make_trajectory: Callable[..., Trajectory]
) -> None:
    folder = model_folder("qwen3_moe")
    trainer = build(folder)
    plain = PolicyModel(load_model(folder, "auto", CPU), packing="auto", logits_bytes=1 << 20)
    micro = build_micro_batch([make_trajectory(routing=(2, 2, 6))])
    with torch.no_grad():
        assert torch.equal(trainer.backend.policy.forward(micro)[0], plain.forward(micro)[0])
