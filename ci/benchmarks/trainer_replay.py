"""What capture and replay of routes cost a step of a small mixture-of-experts model: on against off, in turn.

python ci/benchmarks/trainer_replay.py [--rounds 20]

`replay` is a training step with and without replay; `capture` is the embedded engine sampling the same trajectories
with and without hooks on the experts, answers with packed routes and the audit's digests included. `overhead` is of
both together, what a synchronous step takes longer. Times are CPU time: other processes do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_contracts import (
    Group,
    RoutingTrace,
    Status,
    Trajectory,
    TrajectoryIdentity,
    VersionSpan,
    row_digests,
    wire,
)

VOCAB = 256


@dataclass(frozen=True)
class Size:
    """Sizes of a model."""

    hidden: int
    layers: int
    experts: int
    top_k: int


SIZES = {"recipe": Size(64, 2, 8, 2), "wider": Size(256, 4, 16, 4)}
"""The recipe's mixture, so small that fixed costs count most; and one whose layers take some time."""


def make_groups(groups: int, size: int, model: Size) -> list[Group]:
    """Ragged trajectories with random complete routes."""
    rng = np.random.default_rng(0)
    out = []
    for prompt in range(groups):
        members = []
        for member in range(size):
            total = int(rng.integers(20, 40))
            mask = np.arange(total) >= 12
            ids = np.argsort(rng.random((total - 1, model.layers, model.experts)), axis=-1)[..., : model.top_k]
            members.append(
                Trajectory(
                    identity=TrajectoryIdentity(prompt_index=prompt, member=member),
                    token_ids=rng.integers(3, VOCAB, total).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, np.float32(-5.5), np.float32(np.nan)),
                    version_spans=(VersionSpan(start=12, end=total, version=0),),
                    status=Status.FINISHED,
                    reward=float(rng.integers(0, 2)),
                    routing=RoutingTrace.of(ids, model.experts),
                )
            )
        out.append(Group(prompt_index=prompt, size=size, trajectories=tuple(members)))
    return out


def sampling_jobs(folder: Path, groups: list[Group], experts: int) -> dict[str, Callable[[], None]]:
    """Jobs that sample every trajectory of a step, without and with routes; the model thread's work, in this one."""
    from miles_rollout.engine.answers import add_routes, generate_answer
    from miles_rollout.engine.config import EngineConfig
    from miles_rollout.engine.core import EngineCore, make_limits
    from miles_rollout.engine.loading import load
    from miles_rollout.engine.sequence import Sampling, Sequence
    from miles_rollout.engine.text import TextCodec

    def job(routes: bool) -> Callable[[], None]:
        config = EngineConfig(model_path=folder)
        loaded: Any = load(folder, config.dtype, config.device)
        if not routes:
            for module in loaded.model.modules():
                module._forward_pre_hooks.clear()
            loaded = replace(loaded, routes=None)
        core = EngineCore(loaded, make_limits(config, loaded), TextCodec(folder), "0", lambda _: None)

        def run() -> None:
            core.scheduler.flush()
            sequences = []
            for t in (t for g in groups for t in g):
                new, prompt = t.num_sampled, t.num_tokens - t.num_sampled
                sampling = Sampling(max_new_tokens=new, seed=len(sequences))
                name = str(len(sequences))
                sequences.append(Sequence(id=name, tokens=t.token_ids.copy(), prompt_length=prompt, sampling=sampling))
            core.submit(sequences)
            while core._has_work():
                core._step()
            for sequence in sequences:
                answer = generate_answer(sequence, "", logprobs=True, weight_version="0")
                if routes:
                    add_routes(answer, sequence, "bits", 0, experts)
                sent = wire.decode(wire.encode(answer), dict)
                if routes:
                    row_digests(sent["meta_info"]["routed_experts_trace"].expert_ids)

        return run

    return {"off": job(False), "on": job(True)}


def measure(model: Size, rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and overheads as fractions."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from miles_trainer import Trainer, TrainerConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        moe_intermediate_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=model.hidden // 4,
        num_experts=model.experts,
        num_experts_per_tok=model.top_k,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    groups = make_groups(16, 8, model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        trainers = {
            key: Trainer(folder, TrainerConfig.model_validate({"replay": {"enabled": key == "on"}}), seed=0)
            for key in ("off", "on")
        }
        jobs: dict[str, Callable[[], object]] = {}
        for key, sample in sampling_jobs(folder, groups, model.experts).items():
            jobs[f"capture_{key}"] = sample
            jobs[f"replay_{key}"] = lambda trainer=trainers[key]: trainer.train_step(groups)
        times: dict[str, list[float]] = {key: [] for key in jobs}
        for round_ in range(rounds + 2):
            for key, job in jobs.items():
                start = time.process_time()
                job()
                if round_ >= 2:
                    times[key].append(1e3 * (time.process_time() - start))
    medians = {f"{key}_ms": round(statistics.median(v), 2) for key, v in times.items()}
    columns = {key: np.array(v) for key, v in times.items()}
    columns |= {f"step_{key}": columns[f"capture_{key}"] + columns[f"replay_{key}"] for key in ("off", "on")}
    overheads = {
        name: round(float(np.median(columns[f"{part}_on"] / columns[f"{part}_off"])) - 1, 4)
        for name, part in (("capture_overhead", "capture"), ("replay_overhead", "replay"), ("overhead", "step"))
    }
    return {**medians, **overheads}


def main() -> None:
    """Print one JSON object: a record for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(json.dumps({name: measure(size, rounds) for name, size in SIZES.items()}, indent=1))


if __name__ == "__main__":
    main()
