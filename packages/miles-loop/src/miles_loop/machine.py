"""What this machine must have before a run's folder is made, or an engine started for a measurement."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from miles_contracts import InvalidFieldError
from miles_loop.compose import make_filter
from miles_loop.config import RunConfig, RuntimeKind
from miles_loop.gateway import require_router
from miles_loop.models import num_experts
from miles_loop.placement import Machine
from miles_loop.ports import choose_ports
from miles_loop.preflight import starts_dedicated
from miles_loop.runtime import require_runtime, worth_a_zygote
from miles_loop.scoring import names_function
from miles_loop.sglang_engine import require_sglang
from miles_loop.sizes import ANSWER_KIB, answers_under_way
from miles_rollout.engine_identity import EngineKind
from miles_rollout.imports import load_object

TORCH_MIB, FORKED_MIB, WORKER_MIB = 256, 40, 48
"""Memory that a process with torch (a trainer rank, an engine), one that shares its imports with others, and a rollout
worker take before any model is loaded. A little less than what was measured: nothing that could run is refused."""
_MANY_THREADS = 64
"""CPU threads of one process that are taken for a mistake, unless the machine has as many CPUs."""
_MEMINFO = Path("/proc/meminfo")


def check_machine(config: RunConfig, *, training: bool = True) -> None:
    """Refuse what this machine lacks: the runtime, an engine or a router that is not installed, a port that is taken.

    Args:
        config: of the run.
        training: False for a measurement, which uses no engines of its own for evaluation.

    Raises:
        InvalidFieldError: with what to install or to set.
    """
    require_runtime(config)
    check_threads(config, os.cpu_count() or 1, training=training)
    check_room(config, available_mib(), training=training)
    if training and starts_dedicated(config) and config.engine.kind is EngineKind.SGLANG:
        require_sglang(config.engine)
    model = Path(config.model)
    _check_functions(config, training=training)
    replays = training and config.trainer.replay.enabled
    require_router(config, routing=replays and model.is_dir() and num_experts(model) is not None)
    if config.runtime.kind is RuntimeKind.LOCAL and not config.engine.urls:
        for port in choose_ports(config.engine.host, config.engine.port, config.engine.replicas):
            port.close()


def _check_functions(config: RunConfig, *, training: bool) -> None:
    """Import what the user has named, where the driver runs: what it raises here, it would raise later."""
    task = config.task
    if task.agent is not None:
        load_object(task.agent, field="task.agent")
    for field, reward in (("task.reward", task.reward), ("task.eval_reward", task.eval_reward)):
        if reward is not None and names_function(reward):
            load_object(reward, field=field)
    if training:
        make_filter(config.rollout.filter)


def check_room(config: RunConfig, available: int | None, *, training: bool = True) -> None:
    """Refuse more processes than this machine has memory to start: it would go down with everything that runs on it.

    Args:
        config: of the run.
        available: memory in MiB, None when unknown. Processes on a cluster that is joined are none of this machine's.
        training: False for a measurement, which has no trainer.

    Raises:
        InvalidFieldError: naming the setting that asks for most.
    """
    if available is None:
        return
    driver = _answers(config, training=training)
    ray = config.runtime.kind is RuntimeKind.RAY
    elsewhere = ray and bool(config.runtime.ray.address or os.environ.get("RAY_ADDRESS"))
    asked = driver if elsewhere else _processes(config, training=training) | driver
    needed = sum(mib for _, mib, _ in asked.values())
    if needed > available:
        field, (value, _, each) = max(asked.items(), key=lambda item: item[1][1])
        raise InvalidFieldError(
            field,
            value,
            f"{each}, all that the run starts together {needed:,} MiB, and this machine has {available:,} MiB left; "
            "use fewer, or more machines (--runtime ray --address)",
        )


_Asked = dict[str, tuple[int, int, str]]
"""By setting: its value, the least memory in MiB that it costs, and that in words."""


def _processes(config: RunConfig, *, training: bool) -> _Asked:
    torch = FORKED_MIB if training and worth_a_zygote(config) else TORCH_MIB
    counts = {
        "runtime.trainer_ranks": (config.runtime.trainer_ranks if training else 0, torch),
        "engine.replicas": (0 if config.engine.urls else config.engine.replicas, torch),
        "runtime.rollout_workers": (config.rollout_workers, WORKER_MIB),
        "evaluation.engines": (config.evaluation.engines if training and starts_dedicated(config) else 0, TORCH_MIB),
    }
    return {field: (count, count * each, f"each takes at least {each} MiB") for field, (count, each) in counts.items()}


def _answers(config: RunConfig, *, training: bool) -> _Asked:
    """What the driver itself needs for the answers that it has under way at the same time."""
    measured = config.task.eval_size * config.evaluation.samples
    counts = {"evaluation.samples": (config.evaluation.samples, measured)}
    if training:
        parts = {
            "pipeline_depth": config.pipeline_depth,
            "rollout.groups_per_step": config.rollout.groups_per_step,
            "rollout.group_size": config.rollout.group_size,
        }
        field = max(parts, key=lambda name: parts[name])
        counts[field] = (parts[field], answers_under_way(config))
    words = f"{{:,}} answers under way take {ANSWER_KIB} KiB each"
    return {name: (value, count * ANSWER_KIB // 1024, words.format(count)) for name, (value, count) in counts.items()}


def check_threads(config: RunConfig, cpus: int, *, training: bool = True) -> None:
    """Refuse threads by the thousand, which a system may not even be able to start; on a cluster nodes differ.

    Raises:
        InvalidFieldError: naming the setting.
    """
    if config.runtime.kind is RuntimeKind.RAY:
        return
    asked = {"engine.threads": config.engine.threads}
    if training:
        asked["runtime.trainer_threads"] = config.runtime.trainer_threads
    for field, count in asked.items():
        if count > max(cpus, _MANY_THREADS):
            raise InvalidFieldError(field, count, f"this machine has {cpus} CPUs; use at most so many threads")


def this_machine(config: RunConfig) -> Machine:
    """What the machine has that this process is on."""
    folder = config.run_dir or Path("runs")
    return Machine(
        available_mib=available_mib(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        disk_mib=_free_mib(folder),
        shared_mib=_free_mib(config.sync.directory),
    )


def _free_mib(path: Path) -> int | None:
    """Room where `path` is, or would be; None when the system does not say."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free // 2**20
    except OSError:
        return None


def available_mib() -> int | None:
    """Memory that new processes can have, in MiB; None where the system does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) // 1024 if found else None
