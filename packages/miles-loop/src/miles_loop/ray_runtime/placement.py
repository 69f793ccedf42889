"""What a run asks of a cluster, as plain data, and why a cluster cannot give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles_loop.config import RayPlacement, RunConfig
from miles_loop.trainer_group import rank_name
from miles_rollout.engine_identity import EngineKind

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, and custom ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one actor and the process below it may use, all on one node."""

    name: str
    cpus: float
    gpus: int = 0
    others: Resources = field(default_factory=dict)

    @property
    def resources(self) -> dict[str, float]:
        """As Ray wants it; nothing is left out but zeros, which Ray refuses."""
        wanted = {"CPU": self.cpus, "GPU": float(self.gpus), **self.others}
        return {name: amount for name, amount in wanted.items() if amount}


def plan(config: RunConfig, *, engines: int, trainer: bool, workers: int = 0) -> list[Bundle]:
    """Bundles of one placement group: the trainer's first, when there is one, one an engine, one a rollout worker."""
    ray, bundles = config.runtime.ray, []
    engine_gpus = _engine_gpus(config)
    if trainer:
        bundles += [
            Bundle(
                name=rank_name(rank),
                cpus=ray.trainer_cpus or config.runtime.trainer_threads,
                gpus=_trainer_gpus(config, engine_gpus),
                others=ray.trainer_resources,
            )
            for rank in range(config.runtime.trainer_ranks)
        ]
    engine_cpus = ray.engine_cpus or config.engine.threads
    bundles += [
        Bundle(name=f"engine-{index}", cpus=engine_cpus, gpus=engine_gpus, others=ray.engine_resources)
        for index in range(engines)
    ]
    bundles += [
        Bundle(name=f"rollout-{index}", cpus=ray.rollout_cpus or 1, others=ray.rollout_resources)
        for index in range(workers)
    ]
    return bundles


def _engine_gpus(config: RunConfig) -> int:
    if config.runtime.ray.engine_gpus is not None:
        return config.runtime.ray.engine_gpus
    engine = config.engine
    return engine.sglang.num_gpus if engine.kind is EngineKind.SGLANG and engine.sglang.device != "cpu" else 0


def _trainer_gpus(config: RunConfig, engine_gpus: int) -> int:
    if config.runtime.ray.trainer_gpus is not None:
        return config.runtime.ray.trainer_gpus
    device = config.trainer.device
    return int(device.startswith("cuda") or (device == "auto" and engine_gpus > 0))


def shortage(bundles: Sequence[Bundle], nodes: Sequence[Resources], placement: RayPlacement) -> str | None:
    """Why these nodes cannot hold the bundles even when nothing else uses them, in words; None when they may.

    Never claims a shortage where there is none: packing is only checked bundle by bundle and in sum.
    """
    if not nodes:
        return "no node is alive"
    for bundle in bundles:
        if not any(_fits(bundle.resources, node) for node in nodes):
            return f"no node has {_words(bundle.resources)} for {bundle.name}; the nodes have {_all_words(nodes)}"
    total = _sum([bundle.resources for bundle in bundles])
    if placement is RayPlacement.STRICT_PACK:
        if not any(_fits(total, node) for node in nodes):
            return f"strict_pack wants {_words(total)} on one node; the nodes have {_all_words(nodes)}"
    elif placement is RayPlacement.STRICT_SPREAD and len(nodes) < len(bundles):
        return f"strict_spread wants {len(bundles)} nodes, the cluster has {len(nodes)}"
    if not _fits(total, _sum(nodes)):
        return f"the run wants {_words(total)}, the cluster has {_words(_sum(nodes))}"
    return None


def _fits(wanted: Resources, node: Resources) -> bool:
    # Ray counts in ten-thousandths; a sum of floats may be off by less than that.
    return all(node.get(name, 0.0) + 1e-6 >= amount for name, amount in wanted.items())


def _sum(parts: Sequence[Resources]) -> dict[str, float]:
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _words(resources: Resources) -> str:
    """Amounts that a person cares for; Ray's own bookkeeping names are left out."""
    hidden = ("node:", "object_store_memory", "memory", "accelerator_type:")
    shown = {name: amount for name, amount in sorted(resources.items()) if not name.startswith(hidden)}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"


def _all_words(nodes: Sequence[Resources]) -> str:
    return "; ".join(_words(node) for node in nodes)
