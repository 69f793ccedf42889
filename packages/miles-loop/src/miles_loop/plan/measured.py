"""Rates of a run that took place, from its configuration and `metrics.jsonl`.

The trainer's times are in the records. The engine's are not: what is recorded is how long groups took, under the load
of that run. So the engine's speed is set until the simulation of the same run takes as long for its groups; how it
would change with the load is an assumption (`SHARED`). Step time, idle shares and staleness are not used for that:
they are predicted, and the run's own step time is shown beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError, PauseMode
from miles_loop.config import RunConfig
from miles_loop.options import build, merge
from miles_loop.plan.config import PlanConfig
from miles_loop.plan.simulate import simulate
from miles_loop.run_folder import RunFolder, read_jsonl

SHARED = 0.5
"""Part of a decoding step that grows with the number of sequences, at the load of the run."""
_LEAST = 8
"""Steps below which a run says too little."""
_ASYNC = "rollout/fully_async/"


def layer_of_run(path: Path) -> dict[str, Any]:
    """A configuration layer for `PlanConfig` that describes the run in `path`.

    Raises:
        InvalidFieldError: no run there, or too few steps that say how long their parts took.
    """
    folder = RunFolder(path)
    config = folder.read_config()
    done = [r for r in read_jsonl(folder.metrics_file) if r["step"]]
    records = _steady(done)
    if len(records) < _LEAST:
        raise InvalidFieldError(
            "--from",
            str(path),
            f"{len(records)} usable steps of {len(done)}, and at least {_LEAST} are needed; the first fifth (two at "
            "least) and steps that also evaluated or saved do not count: let it train longer, 14 steps say, without "
            "--evaluation.every and --checkpoint-every",
        )
    layer = merge(
        _shape(config, records),
        {"workload": _workload(config, records)},
        {"trainer": _trainer(records, config.runtime.trainer_ranks)},
    )
    return merge(layer, _engine(layer, config, _mean(records, "perf/rollout_generation_s")))


def _steady(records: Any) -> list[Mapping[str, Any]]:
    """Steps after the start, without those that also evaluated or saved."""
    needed = ("perf/train_s", "perf/step_s", "perf/rollout_generation_s")
    steps = [r for r in records if all(name in r for name in needed)]
    steps = steps[max(2, len(steps) // 5) :]
    return [r for r in steps if "perf/evaluation_s" not in r and "perf/checkpoint_s" not in r]


def _mean(records: Sequence[Mapping[str, Any]], name: str, default: float = 0.0) -> float:
    return math.fsum(float(r.get(name, default)) for r in records) / len(records)


def _shape(config: RunConfig, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rollout, depth = config.rollout, config.pipeline_depth
    batch = rollout.groups_per_step * rollout.group_size
    return {
        "pipeline": {
            "batch": batch,
            "group_size": rollout.group_size,
            "depths": [*sorted({0, 1, depth}), "async"],
            "in_flight": max(2, depth + 1) * batch,
            "buffer_groups": config.buffer_groups,
            "max_staleness": "auto" if rollout.max_staleness is None else rollout.max_staleness,
            "order": rollout.order.value,
            "on_unused": rollout.on_stale.value,
            "rollout_workers": max(config.rollout_workers, 1),
            "update_mode": "in_place" if config.sync.mode is PauseMode.IN_PLACE else "retract",
            "seed": config.seed,
        },
        "engine": {"replicas": len(config.engine.urls) or config.engine.replicas},
        "published": {
            "step_s": _mean(records, "perf/step_s"),
            "statistic": "mean",
            "source": f"{len(records)} steps of the run itself",
            "depth": depth,
        },
        "notes": [
            f"the engine's speed fits the time that groups took in the run; {SHARED:.0%} of a step is taken to grow "
            "with the number of sequences",
            "seconds that environments took in the run count as the engine's",
            f"training as with the run's {config.runtime.trainer_ranks} trainer rank(s), or what --trainer-ranks says",
            "what its driver or rollout workers did for a turn counts as the engine's: set pipeline.handling_s to tell "
            "them apart",
        ],
    }


def _workload(config: RunConfig, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    turns = max(_mean(records, "rollout/turns/mean", 1.0), 1.0)
    length = max(_mean(records, "rollout/response_length/mean"), 1.0)
    width = _mean(records, "rollout/response_length/max") - _mean(records, "rollout/response_length/min")
    count = max(_mean(records, "rollout/trajectories"), 2.0)
    # the expected range of so many normal values, in standard deviations
    deviations = 2.0 * statistics.NormalDist().inv_cdf(1.0 - 0.5 / count)
    refused = sum(float(v) for r in records for k, v in r.items() if k.startswith("rollout/dynamic_filter/drop_"))
    groups = sum(float(r.get("rollout/groups", 0.0)) for r in records)
    return {
        "turns": turns,
        "prompt_tokens": _mean(records, "rollout/prompt_length/mean"),
        "new_tokens": length / turns,
        "new_tokens_spread": width / deviations / length,
        "max_new_tokens": config.rollout.sampling.max_new_tokens,
        "failure_rate": min(_mean(records, "rollout/failed_ratio"), 0.9),
        "filter_rate": min(refused / (refused + groups), 0.95) if refused else 0.0,
    }


def _trainer(records: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    tokens = [
        float(r["rollout/trajectories"])
        * (float(r["rollout/prompt_length/mean"]) + float(r["rollout/response_length/mean"]))
        for r in records
    ]
    seconds = [float(r["perf/train_s"]) for r in records]
    fixed, per_token = _line(tokens, seconds)
    paused, update = _mean(records, "perf/update_weights_paused_s"), _mean(records, "perf/update_weights_s")
    spent = _mean(records, "perf/collect_wait_s") + math.fsum(seconds) / len(seconds) + update
    return {
        "fixed_s": fixed,
        "per_token_s": per_token,
        "prepare_s": max(update - paused, 0.0),
        "pause_s": paused,
        "measured_ranks": ranks,
        "overhead_s": max(_mean(records, "perf/step_s") - spent, 0.0),
    }


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of the least-squares line, neither below zero."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
    return mean_y - slope * mean_x, slope


def _engine(layer: Mapping[str, Any], config: RunConfig, generation_s: float) -> dict[str, Any]:
    """Speed of the engine at which the groups of the simulated run take `generation_s`."""
    flying = layer["pipeline"]["batch"] / layer["engine"]["replicas"]

    def engine(scale: float) -> dict[str, Any]:
        rates = {"base_s": scale * (1 - SHARED), "per_sequence_s": scale * SHARED / flying}
        return {"engine": rates | {"max_running": config.engine.max_batch}}

    def simulated(scale: float) -> float:
        asked = build(PlanConfig, [layer, engine(scale), {"pipeline": {"steps": 24, "warmup": 6}}])
        rates, engines = asked.engine_rates(None)
        pipeline = asked.pipeline_of(config.pipeline_depth, engines)
        return simulate(pipeline, asked.workload_model(), rates, asked.trainer_rates(None)).generation_s

    low, high = 1e-7, 1e3
    for _ in range(18):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if simulated(middle) < generation_s else (low, middle)
    return engine(math.sqrt(low * high))
