"""Where everything of a run would be, before anything is started: the table of `--dry-run`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from miles_loop.config import EvaluationMode, RouterKind, RunConfig, RuntimeKind, TransportKind
from miles_loop.ray_runtime.placement import Bundle, plan
from miles_loop.runtime import worth_a_zygote
from miles_loop.sizes import (
    ROUTER_MIB,
    WORKER_MIB,
    ModelSize,
    checkpoint_mib,
    driver_mib,
    engine_mib,
    trainer_mib,
)
from miles_rollout.engine_identity import EngineKind

HERE = "this machine"
_HEAD = ("process", "number", "where", "address", "threads", "memory each")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Processes that are alike.

    Attributes:
        name: of the first and the last of them.
        count: how many.
        where: machine or part of a cluster.
        address: where they are reached.
        threads: CPU threads of each, None for one that the run does not start.
        mib: memory of each, None when unknown.
        here: they take memory of this machine.
    """

    name: str
    count: int
    where: str
    address: str = "-"
    threads: int | None = 1
    mib: int | None = None
    here: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine has, None for what it does not say.

    Attributes:
        available_mib: memory for new processes.
        cpus: that this process may use.
        disk_mib: room where the run folder would be.
        shared_mib: room of the shared memory that weights travel in.
    """

    available_mib: int | None = None
    cpus: int | None = None
    disk_mib: int | None = None
    shared_mib: int | None = None


def placement(config: RunConfig, model: ModelSize | None) -> list[Row]:
    """One row for each kind of process of a run, the driver first.

    Args:
        config: of the run.
        model: its model, None when it is not here.
    """
    ray = config.runtime.kind is RuntimeKind.RAY
    workers = config.rollout_workers
    duties = [] if workers else ["answers", "rewards"] + (["session server"] if config.task.agent else [])
    rows = [Row(name=" + ".join(["driver", *duties]), count=1, where=HERE, mib=driver_mib(config))]
    ranks = config.runtime.trainer_ranks
    gpu = config.trainer.device.startswith("cuda")
    trainer = Row(
        name=_names("trainer", ranks),
        count=ranks,
        where=HERE,
        address="socket to the driver",
        threads=config.runtime.trainer_threads,
        mib=None if gpu else trainer_mib(config, model),
    )
    made = [trainer, *_engines(config, model)]
    if workers:
        agents = " + session servers" if config.task.agent else ""
        name = f"{_names('rollout', workers, first=0)}{agents}"
        made.append(Row(name=name, count=workers, where=HERE, address="socket to the driver", mib=WORKER_MIB))
    rows += _on_ray(config, made) if ray else made
    if config.engine.router is RouterKind.SGLANG:
        rows.append(Row(name="router (sglang)", count=1, where=HERE, address="127.0.0.1, free ports", mib=ROUTER_MIB))
    return [*rows, *_evaluation(config, model)]


def _engines(config: RunConfig, model: ModelSize | None) -> list[Row]:
    engine = config.engine
    if engine.urls:
        return [_running("engines that run already", engine.urls)]
    ports = f"{engine.port}" if engine.replicas == 1 else f"{engine.port}-{engine.port + engine.replicas - 1}"
    return [
        Row(
            name=f"{_names('engine', engine.replicas, first=0)} ({engine.kind.value})",
            count=engine.replicas,
            where=HERE,
            address=f"{engine.host}:{ports}" if engine.port else f"{engine.host}, free ports",
            threads=engine.threads,
            mib=_engine_mib(config, model),
        )
    ]


def _engine_mib(config: RunConfig, model: ModelSize | None) -> int | None:
    on_gpu = config.engine.kind is EngineKind.SGLANG and config.engine.sglang.device != "cpu"
    return None if on_gpu else engine_mib(config.engine, model)


def _evaluation(config: RunConfig, model: ModelSize | None) -> list[Row]:
    """What measures; the run's own engines in mode shared, which need no row."""
    asked = config.evaluation
    if asked.mode is EvaluationMode.EXTERNAL:
        return [Row(name=f"evaluation: {asked.command[0]}", count=1, where=f"{HERE}, when due", threads=None)]
    if asked.mode is not EvaluationMode.DEDICATED:
        return []
    if asked.urls:
        return [_running("evaluation engines that run already", asked.urls)]
    return [
        Row(
            name=f"evaluation-{_names('engine', asked.engines, first=0)} ({config.engine.kind.value})",
            count=asked.engines,
            where=f"{HERE}, from the first evaluation on",
            address="127.0.0.1, free ports",
            threads=config.engine.threads,
            mib=_engine_mib(config, model),
        )
    ]


def _running(name: str, urls: Sequence[str]) -> Row:
    return Row(name=name, count=len(urls), where="not started here", address=" ".join(urls), threads=None, here=False)


def _names(name: str, count: int, first: int | None = None) -> str:
    """`engine-0..3`, `trainer`, `trainer, trainer-1..3`."""
    if first is not None:
        return f"{name}-{first}" if count == 1 else f"{name}-{first}..{first + count - 1}"
    return name if count == 1 else f"{name}, {name}-1" + (f"..{count - 1}" if count > 2 else "")


def _on_ray(config: RunConfig, rows: Sequence[Row]) -> list[Row]:
    """The same processes as actors: a bundle each, on nodes that Ray chooses."""
    engines = 0 if config.engine.urls else config.engine.replicas
    bundles = plan(config, engines=engines, trainer=True, workers=config.rollout_workers)
    cluster, here = ray_cluster(config)
    placed: list[Row] = []
    first = 0
    for row in rows:
        if row.threads is None:  # it runs already, and takes no bundle
            placed.append(row)
            continue
        last = first + row.count - 1
        numbers = f"bundle {first}" if row.count == 1 else f"bundles {first}-{last}"
        placed.append(
            Row(
                name=row.name,
                count=row.count,
                where=f"{cluster}, {numbers}: {_resources(bundles[first])}" + (" each" if row.count > 1 else ""),
                address="its node's, free port" if row.name.startswith("engine") else "TCP to the driver",
                threads=row.threads,
                mib=row.mib,
                here=here,
            )
        )
        first = last + 1
    return placed


def ray_cluster(config: RunConfig) -> tuple[str, bool]:
    """The cluster in words, and whether it is this machine alone."""
    address = config.runtime.ray.address or os.environ.get("RAY_ADDRESS")
    return (f"Ray at {address}", False) if address else ("Ray on this machine", True)


def _resources(bundle: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.resources.items())


def table(config: RunConfig, model: ModelSize | None, machine: Machine, *, elsewhere: str = "") -> str:
    """The placement for people.

    Args:
        config: of the run.
        model: its model, None when it is not here.
        machine: this one.
        elsewhere: what another machine has to have, when the run is not for this one; "" otherwise.
    """
    rows = placement(config, model)
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = ["placement:"]
    lines += ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    if config.runtime.kind is RuntimeKind.RAY:
        total = sum(row.count for row in rows if row.where.startswith("Ray"))
        lines.append(f"  Ray places {total} bundles ({config.runtime.ray.placement.value}); their nodes it chooses")
    if elsewhere:
        return "\n".join([*lines, f"  for another machine: {elsewhere}"]) + "\n"
    return "\n".join([*lines, "", *_sums(config, rows, model, machine)]) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    threads = "-" if row.threads is None else str(row.threads)
    return row.name, str(row.count), row.where, row.address, threads, "-" if row.mib is None else f"{row.mib:,} MiB"


def _sums(config: RunConfig, rows: Sequence[Row], model: ModelSize | None, machine: Machine) -> list[str]:
    here = [row for row in rows if row.here and row.threads is not None]
    lines = [_memory(here, model, machine)]
    if worth_a_zygote(config):
        lines.append("  trainer and engines share their imports, which are counted for each of them here")
    threads = sum(row.count * (row.threads or 0) for row in here[1:])
    if machine.cpus is not None:
        crowded = "; they will take turns" if threads > machine.cpus else ""
        lines.append(f"  threads: {threads} besides the driver's, for {machine.cpus} CPUs{crowded}")
    if model is not None and config.sync.transport is TransportKind.LOCAL and machine.shared_mib is not None:
        weights = max(1, round(model.parameters * model.itemsize / 2**20))
        needed = min(weights, config.sync.bucket_mib) * 2
        short = "; THAT IS TOO LITTLE: use a larger mount, or another --sync.transport"
        told = short if needed > machine.shared_mib else ""
        where = f"{config.sync.directory}, which has {machine.shared_mib:,} MiB free"
        lines.append(f"  weights: about {needed:,} MiB of {where}{told}")
    if model is not None and machine.disk_mib is not None:
        kept = config.checkpoint.keep + 1
        needed = kept * checkpoint_mib(model)
        told = "; THAT IS TOO LITTLE" if needed > machine.disk_mib else ""
        lines.append(
            f"  disk: {kept} checkpoints of about {checkpoint_mib(model):,} MiB (one is written before the oldest "
            f"goes); {machine.disk_mib:,} MiB are free{told}"
        )
    return lines


def _memory(here: Sequence[Row], model: ModelSize | None, machine: Machine) -> str:
    has = "" if machine.available_mib is None else f", of {machine.available_mib:,} MiB that are available here"
    if model is None:
        return f"  memory: not estimated{has}: the model is not here yet"
    needed = sum(row.count * row.mib for row in here if row.mib is not None)
    gpus = "" if all(row.mib is not None for row in here) else " and what GPUs hold"
    told = "; THAT IS TOO LITTLE" if machine.available_mib is not None and needed > machine.available_mib else ""
    return f"  memory: about {needed:,} MiB{gpus}{has}{told}; activations of the trainer come on top"
