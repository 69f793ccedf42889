"""The reward plot of a run folder: training reward of every step, held-out reward at its evaluations."""

from __future__ import annotations

import os
from pathlib import Path

from miles_loop.files import disk_errors
from miles_loop.report import evaluations
from miles_loop.run_folder import RunFolder, read_jsonl


def plot_rewards(folder: RunFolder, window: int = 5) -> Path | None:
    """Draw `reward.png`; None when there is nothing to draw.

    Args:
        folder: the run.
        window: steps of the running mean.

    Raises:
        DiskFullError: no room.
    """
    records = list(read_jsonl(folder.metrics_file))
    rewards = [(r["step"], r["rollout/reward"]) for r in records if "rollout/reward" in r]
    held_out = evaluations(records)
    if not rewards and not held_out:
        return None
    # Drawn on a canvas without a window system and without pyplot's global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards:
        steps, values = zip(*rewards, strict=True)
        axes.plot(steps, values, color="#9ab8d4", linewidth=1, label="training reward")
        means = [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
        axes.plot(steps, means, color="#1f5f99", linewidth=2, label=f"mean of {window} steps")
    for task in sorted({name for e in held_out for name in e if name != "step"}):
        points = [(e["step"], e[task]) for e in held_out if task in e]
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.5, label=f"held out: {task}")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("reward")
    axes.set_title(folder.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    target = folder.path / "reward.png"
    temporary = folder.path / ".reward.png.tmp"
    with disk_errors(target):
        figure.savefig(temporary, format="png")
        os.replace(temporary, target)
    return target
