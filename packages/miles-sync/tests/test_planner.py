"""What an update costs on paper: volumes of the real plan, and what the command prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_sync.__main__ import main
from miles_sync.models import Architecture, Attention, known_models
from miles_sync.planner import PUBLISHED, Links, Parallel, predict, spread
from miles_sync.transfer import plan_transfers

TINY = Architecture(
    name="tiny", layers=4, hidden=16, vocab=32, attention=Attention(heads=4, kv_heads=4, head_dim=4), experts=8,
    experts_per_token=2, expert_hidden=8, dense_hidden=32, dense_layers=1, shared_hidden=8,
)  # fmt: skip


def test_models_with_a_published_time_are_known() -> None:
    assert PUBLISHED.keys() < known_models().keys()


@pytest.mark.parametrize("trainer", ["tp1", "tp2,pp2,ep4,replicas2", "tp4,pp4,ep2", "pp3,ep2,replicas2"])
@pytest.mark.parametrize("engine", ["tp1", "tp4,ep4", "tp2,ep1"])
def test_the_volume_is_the_minimum_and_nobody_gets_more_than_its_shard(trainer: str, engine: str) -> None:
    tensors, links = TINY.tensors(), Links(network=1.0)
    source, target = Parallel.parse(trainer), Parallel.parse(engine)
    p = predict(tensors, source, target, 3, links)
    received = plan_transfers(spread(tensors, source), spread(tensors, target)).received(target.world)
    assert p.peer_bytes == p.minimum_bytes == 3 * sum(received)
    shards = [rank.num_bytes for rank in spread(tensors, target).ranks]
    assert all(got <= shard for got, shard in zip(received, shards, strict=True))
    assert p.sent_min <= p.sent_max
    assert p.broadcast_s == p.model_bytes / 1e9
    assert p.peer_s == max(p.sent_max, p.target_bytes) / 1e9


def test_layers_go_to_stages_and_experts_to_their_ranks() -> None:
    layout = spread(TINY.tensors(), Parallel(tp=2, pp=2, ep=4, replicas=2))
    first, last = ({s.name: s.shape for s in layout.ranks[r].stored} for r in (0, 7))
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last
    assert "model.layers.001.mlp.experts.down_proj" in first
    assert "model.layers.001.mlp.experts.down_proj" not in last
    assert last["model.layers.003.mlp.experts.down_proj"] == (2, 16, 8)
    assert last["model.layers.003.self_attn.o_proj.weight"] == (16, 8)


def test_the_command_prints_predictions_beside_published_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b-a3b", "--network", "25"]) == 0
    out = capsys.readouterr().out
    assert "30.53 B parameters, 61 GB as it travels" in out
    assert "network 25 GB/s a rank" in out
    assert "61.06 GB to each rank" in out
    assert "2.67 s" in out
    assert "2.16 s" in out
    assert "assumed" in out
    assert main(["plan", "qwen3-30b-a3b", "--engine", "tp4,ep4", "--engines", "1"]) == 0
    assert "2.67 s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer", "tp0"], "Parallel.tp: got 0"),
        (["--trainer", "tp4,ep3"], "it has to divide the 4 ranks"),
        (["--engine", "xp4"], "write it like tp8,pp8"),
        (["--network", "-1"], "Links.network: got -1"),
        (["--engines", "0"], "engines: got 0"),
    ],
)
def test_the_command_refuses_nonsense(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b-a3b", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_ones_own_is_planned_when_its_layouts_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()["qwen3-8b"]))
    assert main(["plan", str(tmp_path), "--trainer", "tp2", "--engine", "tp1"]) == 2
    assert "--engines" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--trainer", "tp2", "--engine", "tp1", "--engines", "4"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path.name}: 8.19 B parameters, 16 GB as it travels" in out
    assert "each sends 32.76 GB" in out


def test_a_model_that_is_not_there_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kimi-k1"]) == 2
    assert "did you mean 'kimi-k2'? use glm-5.2" in capsys.readouterr().err
