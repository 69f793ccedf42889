"""Ours and TRL's GRPOTrainer side by side: the same model, prompts, batch, lengths and number of optimiser steps.

    nox -s bench -- trl_comparison [--repeats 3] [--steps 20]

Both run in turn, several times, each from a cold process start; the table shows medians over the repeats and
ratios (TRL / ours, above 1 is ours better). Processor time is that of the whole run, all processes and the start
included: other work on the machine hardly moves it. Memory is the peak of the whole tree, as proportional set size (a
page that n processes share counts 1/n in each) and, to compare, as the sum of resident set sizes, which counts such a
page n times. TRL lives in `.nox/trl`, which the script makes. Memory compares only where both have the same build of
torch: one for CUDA takes hundreds of MiB more. TRL works in one process, so it is run with one and with two threads,
and the faster of the two is what ratios refer to. Both may use two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from miles_qwen3.model import build_tiny
from miles_qwen3.sorting import TRAIN_FILE, data_file

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "datasets", "accelerate")


@dataclass(frozen=True)
class Outcome:
    """One run: seconds a step (mean, first left out), from start to first step, of processors in all; peaks in MiB."""

    step_s: float
    first_step_s: float
    cpu_s: float
    peak_mib: float
    peak_rss_mib: float


def trl_python() -> str:
    """Interpreter of TRL's environment, made first if it has to be."""
    folder = ROOT / ".nox" / "trl"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *PACKAGES], check=True)
    return str(python)


def torch_build(python: str) -> str:
    """Version of an interpreter's torch with its build, for example 2.13.0+cpu."""
    ask = "import torch; print(torch.__version__)"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def tree(root: int) -> list[int]:
    """Process ids of `root` and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def memory_mib(root: int) -> tuple[float, float]:
    """Proportional and resident set size of a process tree, each summed over its processes."""
    total = {"Pss:": 0, "Rss:": 0}
    for pid in tree(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for name, value in (line.split()[:2] for line in lines if line.startswith(tuple(total))):
            total[name] += int(value)
    return total["Pss:"] / 1024, total["Rss:"] / 1024


@dataclass(frozen=True)
class Measured:
    """What a command wrote, when it was started, what it took."""

    output: str
    started: float
    cpu_s: float
    peak_mib: float
    peak_rss_mib: float


def measured(command: list[str], **environment: str) -> Measured:
    """Run a command and watch its process tree."""
    base = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.time()
    process = subprocess.Popen(
        command, env={**base, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peaks, done = [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            peaks[:] = map(max, peaks, memory_mib(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    output, errors = process.communicate()
    done.set()
    thread.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return Measured(output, started, cpu_s, *peaks)


def outcome(ends: list[float], run: Measured) -> Outcome:
    """Figures from the times at which steps ended."""
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    return Outcome(
        # the mean, not the median: asynchronous steps are uneven and their sum is what one waits for
        step_s=statistics.fmean(gaps),
        first_step_s=ends[0] - run.started,
        cpu_s=run.cpu_s,
        peak_mib=run.peak_mib,
        peak_rss_mib=run.peak_rss_mib,
    )


def run_trl(python: str, model: Path, scratch: Path, options: argparse.Namespace, seed: int, threads: int) -> Outcome:
    """One cold run of TRL."""
    command = [python, str(ROOT / "ci" / "benchmarks" / "trl_side.py"), "--model", str(model)]
    command += ["--prompts", str(data_file(TRAIN_FILE)), "--output", str(scratch), "--steps", str(options.steps)]
    command += ["--groups", str(options.groups), "--group-size", str(options.group_size)]
    command += ["--new-tokens", str(options.new_tokens), "--lr", "1e-3", "--seed", str(seed)]
    command += ["--threads", str(threads)]
    run = measured(command, HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(threads))
    return outcome(json.loads(run.output.splitlines()[-1])["ends"], run)


def run_ours(model: Path, scratch: Path, options: argparse.Namespace, seed: int, depth: int) -> Outcome:
    """One cold run of ours: training steps only, as TRL's."""
    run = scratch / "run"
    settings = {
        "model": model,
        "run-dir": run,
        "steps": options.steps,
        "seed": seed,
        "pipeline-depth": depth,
        "task": data_file(TRAIN_FILE),
        "task.eval_size": 0,
        "rollout.groups_per_step": options.groups,
        "rollout.group_size": options.group_size,
        "rollout.filter": "none",
        "rollout.sampling.max_new_tokens": options.new_tokens,
        "trainer.optimizer.lr": 1e-3,
        "checkpoint.at_end": "false",
        "record.plot": "false",
    }
    command = [sys.executable, "-m", "miles_qwen3", "train", "--hardware", "cpu", "--plain"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    took = measured(command)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return outcome([r["time"] for r in records if r["step"] > 0], took)


def median(runs: list[Outcome]) -> Outcome:
    """Median of every figure."""
    return Outcome(*(statistics.median(getattr(r, f) for r in runs) for f in Outcome.__dataclass_fields__))


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("repeats", 3), ("steps", 20), ("groups", 8), ("group-size", 8), ("new-tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    python = trl_python()
    peers = {"TRL, 1 thread": 1, "TRL, 2 threads": 2}
    names = (*peers, "ours, asynchronous (depth 1)", "ours, synchronous (depth 0)")
    results: dict[str, list[Outcome]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        build_tiny(model, seed=0)
        for repeat in range(options.repeats):
            for name in names:
                scratch = Path(folder) / f"{name[:8]}-{repeat}-{len(results[name])}-{names.index(name)}"
                scratch.mkdir()
                if name in peers:
                    results[name].append(run_trl(python, model, scratch, options, repeat, peers[name]))
                else:
                    depth = 1 if "asynchronous" in name else 0
                    results[name].append(run_ours(model, scratch, options, repeat, depth))
                print(f"  {name}, run {repeat + 1}: {results[name][-1]}", file=sys.stderr)
    # Threads that contend for busy cores can be far slower than one: TRL is taken at its best.
    peer = min((median(results[name]) for name in peers), key=lambda found: found.step_s)
    shape = f"{options.groups} prompts x {options.group_size}, {options.new_tokens} new tokens, {options.steps} steps"
    builds = f"torch {torch_build(sys.executable)}, TRL's {torch_build(python)}"
    print(f"{shape}; {builds}; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':32}{'s/step':>9}{'ratio':>7}{'start to step 1':>17}{'ratio':>7}", end="")
    print(f"{'cpu s':>8}{'ratio':>7}{'peak MiB':>10}{'ratio':>7}{'as RSS':>8}")
    for name in names:
        ours = median(results[name])
        print(
            f"{name:32}{ours.step_s:9.3f}{peer.step_s / ours.step_s:7.2f}{ours.first_step_s:17.1f}"
            f"{peer.first_step_s / ours.first_step_s:7.2f}{ours.cpu_s:8.1f}{peer.cpu_s / ours.cpu_s:7.2f}"
            f"{ours.peak_mib:10.0f}{peer.peak_mib / ours.peak_mib:7.2f}{ours.peak_rss_mib:8.0f}"
        )


if __name__ == "__main__":
    main()
