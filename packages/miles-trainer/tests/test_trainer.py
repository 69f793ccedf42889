"""Steps of the trainer: learning, metrics, refusals, and steps that must change nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_contracts import Group, InvalidFieldError, MilesError, SamplingTransform, Status, Trajectory
from miles_trainer import NonFiniteError, Trainer, TrainerConfig
from miles_trainer.errors import NonFiniteReport

Folder = Callable[..., Path]
Make = Callable[..., Trajectory]
Groups = Callable[..., list[Group]]


def build(folder: Path, **config: Any) -> Trainer:
    return Trainer(folder, TrainerConfig.model_validate(config), seed=0)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.export_weights()}


def test_rewarded_tokens_become_likelier(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3"), optimizer={"lr": 3e-3})
    groups = make_groups(num=2, size=4)
    flat = [t for g in groups for t in g]

    def gap() -> float:
        scores = [s[t.loss_mask].mean() for s, t in zip(trainer.score(flat), flat, strict=True)]
        good = [s for s, t in zip(scores, flat, strict=True) if t.reward]
        bad = [s for s, t in zip(scores, flat, strict=True) if not t.reward]
        return float(np.mean(good) - np.mean(bad))

    before = gap()
    metrics = [trainer.train_step(groups) for _ in range(8)]
    assert gap() > before + 1.0
    assert trainer.version == 8
    assert metrics[-1]["policy_loss"] < metrics[0]["policy_loss"]


def test_supervised_loss_falls_without_rewards(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("llama"), optimizer={"lr": 1e-2}, objective={"kind": "sft"})
    groups = [
        Group(prompt_index=g.prompt_index, size=g.size, trajectories=tuple(t.replace(reward=None) for t in g))
        for g in make_groups()
    ]
    losses = [trainer.train_step(groups)["loss"] for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]


def test_metrics_of_a_step(model_folder: Folder, make_groups: Groups) -> None:
    groups = make_groups(num=3, size=4)
    trainer = build(
        model_folder("qwen3"),
        optimizer={"lr": 1e-3, "schedule": {"kind": "linear", "warmup_steps": 2, "total_steps": 10}},
    )
    metrics = trainer.train_step(groups)
    trained = sum(t.num_trained for g in groups for t in g)
    assert metrics["tokens"] == trained
    assert metrics["trajectories"] == 12
    assert metrics["lr"] == pytest.approx(0.5e-3)
    assert metrics["reward"] == pytest.approx(np.mean([t.reward for g in groups for t in g]))
    for key in (
        "loss", "grad_norm", "entropy", "clip_fraction", "train_rollout_logprob_abs_diff",
        "train_rollout_logprob_abs_diff_max", "train_rollout_kl", "ess_ratio", "excluded", "excluded_groups",
    ):  # fmt: skip
        assert np.isfinite(metrics[key]), key
    assert 0 < metrics["ess_ratio"] <= 1
    assert "router_agreement" not in metrics
    assert "kl_reference" not in metrics


def test_gap_is_zero_when_the_engine_agrees(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3"), optimizer={"lr": 0.0})
    groups = make_groups(temperature=0.8)
    scored = []
    for g in groups:
        members = []
        for t, s in zip(g, trainer.score(list(g)), strict=True):
            assert np.isnan(s[0])
            assert np.isfinite(s[1:]).all()
            members.append(t.replace(logprobs=np.where(np.isnan(t.logprobs), np.nan, s).astype(np.float32)))
        scored.append(Group(prompt_index=g.prompt_index, size=g.size, trajectories=tuple(members)))
    metrics = trainer.train_step(scored)
    assert metrics["train_rollout_logprob_abs_diff_max"] < 1e-5
    assert metrics["train_rollout_kl"] < 1e-9
    assert metrics["clip_fraction"] == 0
    assert metrics["ess_ratio"] == pytest.approx(1.0)


def test_reference_is_loaded_only_when_needed(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3"))
    trainer.train_step(make_groups())
    assert trainer.backend._reference is None
    trainer = build(model_folder("qwen3"), objective={"kl": {"monitor": True}}, optimizer={"lr": 1e-2})
    assert trainer.train_step(make_groups())["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    # the reference stays where it was while the policy moves away
    assert trainer.train_step(make_groups())["kl_reference"] > 1e-4


def test_kl_pulls_towards_the_reference(model_folder: Folder, make_groups: Groups) -> None:
    distances = []
    for coefficient in (0.0, 5.0):
        trainer = build(
            model_folder("qwen3"),
            optimizer={"lr": 2e-3},
            objective={"kl": {"coefficient": coefficient, "monitor": True}},
        )
        for _ in range(6):
            metrics = trainer.train_step(make_groups())
        distances.append(metrics["kl_reference"])
    assert distances[1] < 0.5 * distances[0]


def test_entropy_bonus_raises_entropy(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3"), optimizer={"lr": 2e-3}, objective={"entropy_coefficient": 5.0})
    entropies = [trainer.train_step(make_groups())["entropy"] for _ in range(6)]
    assert entropies[-1] > entropies[0] + 0.1


def test_failed_trajectories_do_not_enter(model_folder: Folder, make_groups: Groups) -> None:
    (group,) = make_groups(num=1, size=4)
    broken = tuple(
        t.replace(status=Status.FAILED, reward=None, error="reward raised") if t.identity.member == 3 else t
        for t in group
    )
    alone = build(model_folder("qwen3"))
    metrics = alone.train_step([Group(prompt_index=0, size=4, trajectories=broken)])
    assert metrics["excluded"] == 1
    assert metrics["trajectories"] == 3
    without = build(model_folder("qwen3"))
    without.train_step([Group(prompt_index=0, size=4, trajectories=broken[:3])])
    for name, tensor in weights(alone).items():
        assert torch.equal(tensor, weights(without)[name])


def poisoned(trainer: Trainer) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = trainer.backend.policy.model.get_output_embeddings().weight
    return parameter


def test_nan_weights_name_the_trajectory_and_change_nothing(model_folder: Folder, make_trajectory: Make) -> None:
    trainer = build(model_folder("llama"), optimizer={"lr": 1e-2})
    good = [make_trajectory(member=i, reward=float(i), vocab=40) for i in range(3)]
    trainer.train_step([Group(prompt_index=0, size=3, trajectories=tuple(good))])
    ids = good[1].token_ids.copy()
    ids[8] = 50
    bad = (good[0], good[1].replace(token_ids=ids), good[2])
    with torch.no_grad():
        trainer.backend.policy.model.get_input_embeddings().weight[50] = float("nan")
    before, state = weights(trainer), {k: v.clone() for k, v in trainer.backend.optimizer.state().items()}
    # only the trajectory that holds the poisoned token is affected, although all three are packed together
    with pytest.raises(NonFiniteError, match="prompt 0 member 1 leaf 0 attempt 0, token .*unchanged") as caught:
        trainer.train_step([Group(prompt_index=0, size=3, trajectories=bad)])
    assert (caught.value.report.what, caught.value.report.value) == ("logprob", "nan")
    assert caught.value.report.count <= 7
    assert trainer.version == 1
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0))
    for key, value in trainer.backend.optimizer.state().items():
        assert torch.equal(value, state[key])
    assert all(p.grad is None for p in trainer.backend.policy.model.parameters())
    # the trainer is still usable
    trainer.train_step([Group(prompt_index=0, size=3, trajectories=tuple(good))])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_report_points_at_the_token(value: float, model_folder: Folder, make_trajectory: Make) -> None:
    trainer = build(model_folder("llama"))
    members = [make_trajectory(member=i, reward=float(i), total=12 - i, start=5) for i in range(2)]
    forward = trainer.backend.policy.forward

    def spoil(*args: Any, **kwargs: Any) -> Any:
        out, entropy = forward(*args, **kwargs)
        factor = torch.ones_like(out)
        factor[7 + 2] = value  # the longer trajectory has 7 trained tokens, so this is the other one's third
        return out * factor, entropy

    trainer.backend.policy.forward = spoil  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError) as caught:
        trainer.train_step([Group(prompt_index=0, size=2, trajectories=tuple(members))])
    report = caught.value.report
    assert report.identity == members[1].identity
    assert (report.token, report.count) == (7, 1)


def test_infinite_gradient_names_parameters(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("llama"))
    head = poisoned(trainer)
    head.register_hook(lambda g: g * float("inf"))
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"gradient.*lm_head\.weight; trajectories of the step: prompt") as caught:
        trainer.train_step(make_groups())
    assert caught.value.report.parameters == ("lm_head.weight",)
    assert trainer.version == 0
    assert trainer.backend.optimizer.state() == {}
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, before[name])


def test_a_later_micro_batch_that_fails_leaves_no_gradient(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("llama"), batching={"max_tokens": 30})
    groups = make_groups()
    calls = 0
    forward = trainer.backend.policy.forward

    def fail_third(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        out, entropy = forward(*args, **kwargs)
        return (out * float("nan") if calls == 3 else out), entropy

    trainer.backend.policy.forward = fail_third  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError):
        trainer.train_step(groups)
    assert all(p.grad is None for p in trainer.backend.policy.model.parameters())


def test_refusals(model_folder: Folder, make_trajectory: Make, make_groups: Groups, tmp_path: Path) -> None:
    trainer = build(model_folder("qwen3"))
    with pytest.raises(InvalidFieldError, match="groups: got '0 groups"):
        trainer.train_step([])
    lone = make_trajectory()
    with pytest.raises(InvalidFieldError, match=r"Group\.size of prompt 0"):
        trainer.train_step([Group(prompt_index=0, size=1, trajectories=(lone,))])
    with pytest.raises(InvalidFieldError, match="vocabulary has 61 ids"):
        trainer.train_step(make_groups(vocab=99, longest=30))
    with pytest.raises(InvalidFieldError, match="holds at most 128 tokens"):
        trainer.score([make_trajectory(total=200)])
    empty = [make_trajectory(member=m, total=5, start=5) for m in range(2)]
    with pytest.raises(InvalidFieldError, match="at least one scored trajectory with a trained token"):
        trainer.train_step([Group(prompt_index=0, size=2, trajectories=tuple(empty))])
    with pytest.raises(InvalidFieldError, match=r"model_path.*config\.json"):
        build(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidFieldError, match="no weights"):
        build(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidFieldError, match="transformers cannot load it"):
        build(tmp_path)


def test_a_truncated_weights_file_is_named(model_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidFieldError, match=r"model_path: got '.*model\.safetensors'; .*truncated or damaged"):
        build(folder)


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named(device: str, model_folder: Folder) -> None:
    with pytest.raises(InvalidFieldError, match=f"trainer.device: got '{device}'; use auto or cpu; torch says"):
        build(model_folder("llama"), device=device)


def test_a_report_shows_the_first_names_and_counts_the_rest() -> None:
    names = tuple(f"layers.{i}.weight" for i in range(20))
    report = NonFiniteReport(what="gradient", count=9, value="nan", parameters=names, candidates=("a", "b", "c"))
    assert str(report) == (
        "9 non-finite gradient value(s), the first is nan in layers.0.weight, layers.1.weight, layers.2.weight "
        "and 17 more; trajectories of the step: a, b, c"
    )


def test_truncated_sampling_warns_once(
    model_folder: Folder, make_groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(model_folder("qwen3"))
    plain = make_groups(num=1)
    cut = [
        Group(
            prompt_index=g.prompt_index,
            size=g.size,
            trajectories=tuple(t.replace(sampling=SamplingTransform(top_p=0.9)) for t in g),
        )
        for g in plain
    ]
    with caplog.at_level(logging.WARNING, logger="miles_trainer.trainer"):
        trainer.train_step(plain)
        assert caplog.records == []
        trainer.train_step(cut)
        trainer.train_step(cut)
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "trajectories were sampled with top_p=0.9, top_k=-1, min_p=0"
    ]


def test_score_of_short_trajectories(model_folder: Folder, make_trajectory: Make) -> None:
    trainer = build(model_folder("qwen3"), batching={"max_tokens": 20})
    sizes = (1, 9, 2, 15)
    scores = trainer.score([make_trajectory(total=n, start=min(n, 1), member=i) for i, n in enumerate(sizes)])
    assert [len(s) for s in scores] == list(sizes)
    assert all(np.isnan(s[0]) and np.isfinite(s[1:]).all() and s.dtype == np.float32 for s in scores)
    assert trainer.score([]) == []


def test_sleep_and_wake(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3"))
    trainer.sleep()
    trainer.sleep()
    with pytest.raises(MilesError, match=r"call wake\(\) first"):
        trainer.train_step(make_groups())
    with pytest.raises(MilesError, match="sleeps"):
        trainer.score([])
    trainer.wake()
    trainer.train_step(make_groups())


def test_bfloat16_model_learns_through_float32_masters(model_folder: Folder, make_groups: Groups) -> None:
    trainer = build(model_folder("qwen3"), dtype="bfloat16", optimizer={"lr": 1e-5}, batching={"max_tokens": 40})
    start = {n: m.clone() for n, m in trainer.backend.optimizer.masters.items()}
    for _ in range(3):
        trainer.train_step(make_groups())
    moved = sum(int((m != start[n]).sum()) for n, m in trainer.backend.optimizer.masters.items())
    total = sum(m.numel() for m in start.values())
    # steps of 1e-5 vanish in bfloat16 weights of size 0.3, the masters keep them
    assert moved > 0.9 * total
    for name, parameter in trainer.backend.policy.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, trainer.backend.optimizer.masters[name].to(torch.bfloat16))
