"""What goes into `metrics.jsonl`: one flat record a step, every key under `train/`, `rollout/`, `eval/` or `perf/`.

Everything that depends on the clock is under `perf/` (and `time`), so that two runs that did the same have the same
records without those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles_contracts import Group, Status

_ASYNC = "rollout/fully_async/"


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, independent of the order of the values."""
    return math.fsum(values) / len(values)


def rollout_record(groups: Sequence[Group], arrived_reward: float | None) -> dict[str, float]:
    """Figures of the trained batch.

    Args:
        groups: the batch.
        arrived_reward: mean reward of all groups that were finished since the last step, dropped ones included.
    """
    trajectories = [t for group in groups for t in group]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    lengths = [float(t.num_sampled) for t in trajectories]
    prompts = [float(t.num_tokens - t.num_sampled) for t in trajectories]
    statuses = [t.status for t in trajectories]
    out = {
        "rollout/groups": float(len(groups)),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/response_length/mean": mean(lengths),
        "rollout/response_length/max": max(lengths),
        "rollout/response_length/min": min(lengths),
        "rollout/prompt_length/mean": mean(prompts),
        "rollout/truncated_ratio": statuses.count(Status.TRUNCATED) / len(statuses),
        "rollout/turns/mean": mean([float(len(t.turns)) for t in trajectories]),
    }
    if rewards:
        out["rollout/reward_trained"] = mean(rewards)
        out["rollout/reward_std"] = math.sqrt(mean([(r - out["rollout/reward_trained"]) ** 2 for r in rewards]))
        out["rollout/reward"] = arrived_reward if arrived_reward is not None else out["rollout/reward_trained"]
    for name in sorted({name for t in trajectories for name in t.metrics}):
        out[f"rollout/metrics/{name}"] = mean([t.metrics[name] for t in trajectories if name in t.metrics])
    return out


def session_counts(record: Mapping[str, float]) -> dict[str, float]:
    """What the sessions of an agent's task have counted, under the names that `status.json` adds up: `session/...`."""
    prefix = "rollout/session/"
    return {"session/" + key.removeprefix(prefix): v for key, v in record.items() if key.startswith(prefix)}


def split_clock(metrics: Mapping[str, float]) -> dict[str, float]:
    """The rollout half's figures with those that depend on the clock moved under `perf/`."""
    out: dict[str, float] = {}
    for key, value in metrics.items():
        if key.endswith("_seconds"):
            name = key.removeprefix(_ASYNC).removeprefix("rollout/").removesuffix("_seconds").replace("/", "_")
            out[f"perf/rollout_{name}_s"] = value
        else:
            out[key] = value
    return out


def ledger_entry(step: int, groups: Sequence[Group]) -> dict[str, Any]:
    """Which prompts a step trained: [prompt index, attempt] each."""
    return {"step": step, "prompts": [[group.prompt_index, group.attempt] for group in groups]}
