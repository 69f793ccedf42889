"""Step time of the trainer against plain PyTorch on the same trajectories, in one run, in turn.

Plain PyTorch is what one writes first: pad to the longest, `model(input_ids, attention_mask)`, log-softmax of
all logits, the same loss, backward, clip, AdamW. The floor is forward and backward alone on exactly the tokens
that the trainer feeds, without padding, advantages, metrics or optimiser.

    python ci/benchmarks/trainer.py [--groups 16] [--size 8] [--vocab 256] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from miles_contracts import Group, Status, Trajectory, TrajectoryIdentity, VersionSpan


def make_groups(args: argparse.Namespace) -> list[Group]:
    """Groups of ragged trajectories that share a prompt, 12 prompt and 8 to 28 sampled tokens."""
    rng = np.random.default_rng(0)
    groups = []
    for prompt in range(args.groups):
        prefix = rng.integers(3, args.vocab, 12)
        members = []
        for member in range(args.size):
            sampled = int(rng.integers(args.shortest, args.longest + 1))
            ids = np.concatenate([prefix, rng.integers(3, args.vocab, sampled)]).astype(np.int32)
            mask = np.arange(len(ids)) >= 12
            members.append(
                Trajectory(
                    identity=TrajectoryIdentity(prompt_index=prompt, member=member),
                    token_ids=ids,
                    loss_mask=mask,
                    logprobs=np.where(mask, np.float32(-np.log(args.vocab)), np.float32(np.nan)),
                    version_spans=(VersionSpan(start=12, end=len(ids), version=0),),
                    status=Status.FINISHED,
                    reward=float(rng.integers(0, 2)),
                )
            )
        groups.append(Group(prompt_index=prompt, size=args.size, trajectories=tuple(members)))
    return groups


def make_model(folder: Path, args: argparse.Namespace) -> None:
    """A tiny Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def plain_step(folder: Path, groups: list[Group]) -> Callable[[], None]:
    """Padded batch, full logits, GRPO with clipping, AdamW: the straightforward program."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    flat = [t for g in groups for t in g]
    width = max(t.num_tokens for t in flat)
    ids = torch.zeros(len(flat), width, dtype=torch.int64)
    keep, old = torch.zeros(len(flat), width), torch.zeros(len(flat), width)
    mask = torch.zeros(len(flat), width, dtype=torch.int64)
    for i, t in enumerate(flat):
        ids[i, : t.num_tokens] = torch.from_numpy(t.token_ids.astype(np.int64))
        mask[i, : t.num_tokens] = 1
        keep[i, : t.num_tokens] = torch.from_numpy(t.loss_mask.astype(np.float32))
        old[i, : t.num_tokens] = torch.from_numpy(np.nan_to_num(t.logprobs))
    rewards = torch.tensor([[t.reward for t in g] for g in groups])
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).reshape(-1, 1)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        new = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (new - old[:, 1:]).exp()
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        ((loss * keep[:, 1:]).sum() / keep.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def floor_step(trainer: Any, groups: list[Group]) -> Callable[[], None]:
    """Forward and backward of the packed tokens alone."""
    import torch

    from miles_trainer.batching import build_micro_batch

    flat = [t for g in groups for t in g]
    micro = build_micro_batch(flat, np.ones(len(flat)), np.ones(len(flat)))
    policy = trainer.backend.policy

    def step() -> None:
        logprobs, _ = policy.forward(micro)
        torch.sum(logprobs).backward()
        policy.model.zero_grad()

    return step


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Medians in milliseconds and their ratios."""
    from miles_trainer import Trainer, TrainerConfig

    groups = make_groups(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        make_model(folder, args)
        trainer = Trainer(folder, TrainerConfig(), seed=0)
        programs = {
            "trainer": lambda: trainer.train_step(groups),
            "plain": plain_step(folder, groups),
            "floor": floor_step(trainer, groups),
        }
        times: dict[str, list[float]] = {k: [] for k in programs}
        for round_ in range(args.rounds + 2):
            for key, program in programs.items():
                start = time.perf_counter()
                program()
                if round_ >= 2:
                    times[key].append(1e3 * (time.perf_counter() - start))
    out = {f"{k}_ms": statistics.median(v) for k, v in times.items()}
    out["trainer_over_plain"] = statistics.median(a / b for a, b in zip(times["trainer"], times["plain"], strict=True))
    out["trainer_over_floor"] = statistics.median(a / b for a, b in zip(times["trainer"], times["floor"], strict=True))
    out["tokens"] = float(sum(t.num_tokens for g in groups for t in g))
    return out


def peak_memory(which: str, args: argparse.Namespace) -> float:
    """Peak resident MiB of a process that runs three steps of one program."""
    command = [sys.executable, __file__, "--only", which]
    for name in ("groups", "size", "vocab", "hidden", "layers", "shortest", "longest"):
        command += [f"--{name}", str(getattr(args, name))]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["peak_mib"])


def only(which: str, args: argparse.Namespace) -> None:
    """Three steps of one program; prints the peak of this process."""
    groups = make_groups(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        make_model(folder, args)
        if which == "plain":
            step = plain_step(folder, groups)
        else:
            from miles_trainer import Trainer, TrainerConfig

            trainer = Trainer(folder, TrainerConfig(), seed=0)

            def step() -> None:
                trainer.train_step(groups)

        for _ in range(3):
            step()
    print(json.dumps({"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "groups": 16, "size": 8, "vocab": 256, "hidden": 64, "layers": 3, "shortest": 8, "longest": 28, "rounds": 20,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=["plain", "trainer"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        only(args.only, args)
        return
    result = measure(args)
    result["trainer_peak_mib"] = peak_memory("trainer", args)
    result["plain_peak_mib"] = peak_memory("plain", args)
    print(json.dumps({k: round(v, 3) for k, v in result.items()}, indent=1))


if __name__ == "__main__":
    main()
