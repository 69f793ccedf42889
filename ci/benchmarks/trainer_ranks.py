"""Step time of one trainer rank and of two on the same batch, in turn, and what summing gradients costs.

    python ci/benchmarks/trainer_ranks.py [--ranks 2] [--groups 16] [--hidden 256] [--rounds 12]

`speedup` is the step of one rank over that of all together; `cpu_speedup` the same in processor time of the busiest
rank, which other programs on the machine do not touch. `reduce_over_raw` is the time in which a step sums its gradients
over that of gloo summing as many bytes in one call, right after it; `reduce_share` its part of the step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trainer import make_groups, make_model

Row = dict[str, float]


def work(end: Connection, folder: Path, args: argparse.Namespace, rank: int, size: int, port: int | None) -> None:
    """A rank: a step, and a sum of as many bytes, whenever it is told to go."""
    import torch
    import torch.distributed as dist

    from miles_trainer import Trainer, TrainerConfig
    from miles_trainer.ranks import TorchRanks, meeting_point

    torch.set_num_threads(1)
    group = None
    if port is not None:
        store = meeting_point("127.0.0.1", port, timeout_s=300)
        group = TorchRanks(store, rank, size, timeout_s=300, host="127.0.0.1")
        raw = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), rank, size)
    trainer = Trainer(folder, TrainerConfig(), seed=0, ranks=group)
    groups = make_groups(args)
    flat = torch.ones(sum(p.numel() for p in trainer.backend.policy.model.parameters()))
    end.send(None)
    while end.recv():
        began, began_cpu = time.perf_counter(), time.process_time()
        trainer.train_step(groups)
        row = {"step": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
        if group is not None:
            row |= {"reduce": group.reduce_s, "wait": group.wait_s}
            raw.barrier().wait()
            began = time.perf_counter()
            raw.allreduce([flat]).wait()
            row["raw"] = time.perf_counter() - began
        end.send(row)


def start(folder: Path, args: argparse.Namespace, size: int, port: int | None) -> list[Any]:
    """Processes of a group of this size, with their ends of pipes."""
    context = multiprocessing.get_context("spawn")
    made = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, folder, args, rank, size, port), daemon=True)
        process.start()
        made.append((ours, process))
    return made


def go(ranks: list[Any]) -> list[Row]:
    """One round of a group."""
    for end, _ in ranks:
        end.send(True)
    return [end.recv() for end, _ in ranks]


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Medians over rounds in which both groups take turns."""
    from miles_trainer.ranks import meeting_point

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        make_model(folder, args)
        store = meeting_point("127.0.0.1", timeout_s=300)
        one, all_of_them = start(folder, args, 1, None), start(folder, args, args.ranks, store.port)
        for end, _ in (*one, *all_of_them):
            end.recv()
        lone: list[Row] = []
        together: list[list[Row]] = []
        for round_ in range(args.rounds + 2):
            found = go(one)[0], go(all_of_them)
            if round_ >= 2:
                lone.append(found[0])
                together.append(found[1])
        for end, process in (*one, *all_of_them):
            end.send(False)
            process.join()

    def worst(key: str) -> list[float]:
        return [max(row[key] for row in rows) for rows in together]

    step, reduce = worst("step"), worst("reduce")
    return {
        "one_ms": 1e3 * statistics.median(row["step"] for row in lone),
        "together_ms": 1e3 * statistics.median(step),
        "speedup": statistics.median(a["step"] / b for a, b in zip(lone, step, strict=True)),
        "cpu_speedup": statistics.median(a["cpu"] / b for a, b in zip(lone, worst("cpu"), strict=True)),
        "reduce_ms": 1e3 * statistics.median(reduce),
        "reduce_share": statistics.median(a / b for a, b in zip(reduce, step, strict=True)),
        "wait_share": statistics.median(a / b for a, b in zip(worst("wait"), step, strict=True)),
        "reduce_over_raw": statistics.median(a / b for a, b in zip(reduce, worst("raw"), strict=True)),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "ranks": 2, "groups": 16, "size": 8, "vocab": 4096, "hidden": 256, "layers": 4, "shortest": 8, "longest": 28,
        "rounds": 12,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    print(json.dumps({k: round(v, 3) for k, v in measure(parser.parse_args()).items()}, indent=1))


if __name__ == "__main__":
    main()
