"""What routing replay costs a step of a small mixture-of-experts model: replay on against off, in turn.

python ci/benchmarks/trainer_replay.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from miles_contracts import Group, RoutingTrace, Status, Trajectory, TrajectoryIdentity, VersionSpan

LAYERS, TOP_K, EXPERTS, VOCAB = 3, 2, 8, 256


def make_groups(groups: int, size: int) -> list[Group]:
    """Ragged trajectories with random complete routes."""
    rng = np.random.default_rng(0)
    out = []
    for prompt in range(groups):
        members = []
        for member in range(size):
            total = int(rng.integers(20, 40))
            mask = np.arange(total) >= 12
            ids = np.argsort(rng.random((total - 1, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
            members.append(
                Trajectory(
                    identity=TrajectoryIdentity(prompt_index=prompt, member=member),
                    token_ids=rng.integers(3, VOCAB, total).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, np.float32(-5.5), np.float32(np.nan)),
                    version_spans=(VersionSpan(start=12, end=total, version=0),),
                    status=Status.FINISHED,
                    reward=float(rng.integers(0, 2)),
                    routing=RoutingTrace.of(ids, EXPERTS),
                )
            )
        out.append(Group(prompt_index=prompt, size=size, trajectories=tuple(members)))
    return out


def main() -> None:
    """Print one JSON object."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from miles_trainer import Trainer, TrainerConfig

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    groups = make_groups(16, 8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        trainers = {
            key: Trainer(folder, TrainerConfig.model_validate({"replay": {"enabled": key == "on"}}), seed=0)
            for key in ("off", "on")
        }
        times: dict[str, list[float]] = {key: [] for key in trainers}
        for round_ in range(rounds + 2):
            for key, trainer in trainers.items():
                start = time.perf_counter()
                trainer.train_step(groups)
                if round_ >= 2:
                    times[key].append(1e3 * (time.perf_counter() - start))
    medians = {f"replay_{key}_ms": round(statistics.median(v), 2) for key, v in times.items()}
    overhead = statistics.median(a / b for a, b in zip(times["on"], times["off"], strict=True)) - 1
    print(json.dumps({**medians, "overhead": round(overhead, 4)}, indent=1))


if __name__ == "__main__":
    main()
