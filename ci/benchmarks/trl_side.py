"""TRL's half of `trl_comparison.py`: GRPOTrainer on the CPU, run in an environment of its own.

Prints one JSON object: the wall-clock time at the end of every optimiser step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "prompts", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "groups", "group-size", "new-tokens", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    records = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": r["prompt"]}], "label": r["label"]} for r in records]
    )

    def reward(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        pairs = zip(texts, label, strict=True)
        return [sum(a == b for a, b in zip(t, w, strict=False)) / max(len(t), len(w), 1) for t, w in pairs]

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

    config = GRPOConfig(
        output_dir=str(options.output),
        per_device_train_batch_size=options.groups * options.group_size,
        num_generations=options.group_size,
        max_completion_length=options.new_tokens,
        max_steps=options.steps,
        learning_rate=options.lr,
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=options.seed,
    )
    trainer = GRPOTrainer(
        model=str(options.model),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps({"ends": ends}))


if __name__ == "__main__":
    main()
