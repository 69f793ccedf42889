"""What the Ray runtime costs beside the local one: start, step time, processor time and memory, in the same run.

    nox -s bench -- ray_runtime [--repeats 3] [--steps 20]

The same training run (the recipe's tiny model) is started in turn as child processes of this machine, on a Ray cluster
that it starts for itself (both with and without a rollout worker), and on a cluster of two nodes that is there already.
The table shows medians. Memory is the peak of the proportional set size of everything below this script; Ray's share is
that of its daemons and actors, without the engine, trainer and rollout worker below them. An idle cluster is measured
once, before anything has joined it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trl_comparison import tree

from miles_qwen3.model import build_tiny
from miles_qwen3.sorting import TRAIN_FILE, data_file

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_TICKS = os.sysconf("SC_CLK_TCK")
_RAYS_OWN = ("ray::", "/ray/core/", "/ray/_private/", "/ray/dashboard/")


@dataclass(frozen=True)
class Usage:
    """Of all processes below this one at one moment: MiB, MiB of Ray's own, processor seconds by process."""

    mib: float
    ray_mib: float
    cpu_s: dict[int, float]


@dataclass(frozen=True)
class Outcome:
    """One run: seconds from start to the first step, mean seconds a step after it, to the end of the last process;
    processor seconds; peak MiB, and Ray's share of that."""

    first_step_s: float
    step_s: float
    wall_s: float
    cpu_s: float
    peak_mib: float
    ray_mib: float


def usage() -> Usage:
    """What runs below this process now."""
    total = own = 0.0
    cpu: dict[int, float] = {}
    for pid in tree(os.getpid()):
        if pid == os.getpid():
            continue
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            command = Path(f"/proc/{pid}/cmdline").read_text()
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:
            continue
        mib = sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024
        total += mib
        cpu[pid] = sum(map(int, ticks)) / _TICKS
        if any(part in command for part in _RAYS_OWN) and "miles_loop.child" not in command:
            own += mib
    return Usage(total, own, cpu)


def run(model: Path, scratch: Path, options: argparse.Namespace, *words: str) -> Outcome:
    """One cold run."""
    folder = scratch / "run"
    command = [sys.executable, "-m", "miles_qwen3", "train", "--hardware", "cpu", "--plain", "--model", str(model)]
    command += ["--run-dir", str(folder), "--steps", str(options.steps), "--task", str(data_file(TRAIN_FILE))]
    command += ["--task.eval_size", "0", "--rollout.groups_per_step", "8", "--rollout.filter", "none"]
    command += ["--rollout.sampling.max_new_tokens", "32", "--checkpoint.at_end", "false", "--record.plot", "false"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = usage().cpu_s
    seen: dict[int, float] = {}
    peak = Usage(0.0, 0.0, {})
    started = time.time()
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen([*command, *words], env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            now = usage()
            seen |= now.cpu_s
            peak = max(peak, now, key=lambda found: found.mib)
            time.sleep(0.25)
    wall = time.time() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{(scratch / 'output').read_text()}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = [record["time"] for record in records if record["step"] > 0]
    cpu = sum(seconds - before.get(pid, 0.0) for pid, seconds in seen.items())
    step = (ends[-1] - ends[0]) / (len(ends) - 1)
    return Outcome(ends[0] - started, step, wall, cpu, peak.mib, peak.ray_mib)


def show(name: str, runs: list[Outcome], base: Outcome) -> None:
    """One line of the table, ratios to the local runtime in brackets."""
    found = [statistics.median(getattr(r, f) for r in runs) for f in Outcome.__dataclass_fields__]
    local = [getattr(base, f) for f in Outcome.__dataclass_fields__]
    cells = [f"{v:9.2f} ({v / b:4.2f})" if b else f"{v:9.0f}       " for v, b in zip(found, local, strict=True)]
    print(f"{name:34}" + "".join(cells))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    kinds: dict[str, tuple[str, ...]] = {
        "local": (),
        "local, a rollout worker": ("--rollout.workers", "1"),
        "Ray, a cluster of its own": ("--runtime", "ray", "--address", "local"),
        "Ray, so, no rollout worker": ("--runtime", "ray", "--address", "local", "--rollout.workers", "0"),
    }
    results: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        build_tiny(model, seed=0)

        def measure(name: str, *words: str) -> None:
            scratch = Path(tempfile.mkdtemp(dir=folder))
            results.setdefault(name, []).append(run(model, scratch, options, *words))
            print(f"  {name}: {results[name][-1]}", file=sys.stderr)

        for _ in range(options.repeats):
            for name, words in kinds.items():
                measure(name, *words)
        started = time.time()
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        cluster_s, idle = time.time() - started, usage()
        for _ in range(options.repeats):
            measure("local, an idle cluster beside it")
            measure("Ray, joins two nodes", "--runtime", "ray", "--address", cluster.address)
        cluster.shutdown()
    print(f"{options.steps} steps of 8 groups x 8 answers of 32 tokens; ratios to the local runtime in brackets")
    print(f"starting a cluster of two nodes: {cluster_s:.1f} s; idle it takes {idle.mib:.0f} MiB")
    heads = ("start to step 1", "s/step", "whole run, s", "CPU s", "peak MiB", "Ray's MiB")
    print(f"{'':34}" + "".join(f"{head:>16}" for head in heads))
    base = Outcome(*(statistics.median(getattr(r, f) for r in results["local"]) for f in Outcome.__dataclass_fields__))
    for name, runs in results.items():
        show(name, runs, base)


if __name__ == "__main__":
    main()
