"""More processes than a machine can start are refused before one is started."""

import os
from typing import Any

import pytest

from miles_contracts import InvalidFieldError
from miles_loop.config import RunConfig
from miles_loop.machine import FORKED_MIB, TORCH_MIB, WORKER_MIB, available_mib, check_room, check_threads
from miles_loop.runtime import worth_a_zygote
from miles_loop.zygote import can_fork


def config(**sections: Any) -> RunConfig:
    runtime = {"share_imports": False, **sections.pop("runtime", {})}
    # So few answers that they count for nothing, unless a test wants more.
    sections["rollout"] = {"groups_per_step": 2, "group_size": 4} | sections.pop("rollout", {})
    task = {"source": "jsonl", "path": "p.jsonl", "eval_size": 16}
    return RunConfig.model_validate({"model": "m", "task": task, "runtime": runtime, **sections})


@pytest.mark.parametrize(
    ("sections", "field", "value"),
    [
        ({"runtime": {"trainer_ranks": 50}}, "runtime.trainer_ranks", 50),
        ({"engine": {"replicas": 50}}, "engine.replicas", 50),
        ({"runtime": {"rollout_workers": 400}}, "runtime.rollout_workers", 400),
        ({"runtime": {"kind": "ray", "trainer_ranks": 50}}, "runtime.trainer_ranks", 50),
    ],
)
def test_what_asks_for_most_is_named(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], field: str, value: int
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InvalidFieldError, match="use fewer") as refusal:
        check_room(config(**sections), 8192)
    assert (refusal.value.field, refusal.value.value) == (field, value)


@pytest.mark.parametrize(
    ("sections", "field", "value"),
    [
        ({"rollout": {"groups_per_step": 10**6}}, "rollout.groups_per_step", 10**6),
        ({"rollout": {"group_size": 10**6}}, "rollout.group_size", 10**6),
        ({"pipeline_depth": 10**6}, "pipeline_depth", 10**6),
        ({"evaluation": {"samples": 10**6}}, "evaluation.samples", 10**6),
        ({"runtime": {"kind": "ray", "ray": {"address": "a:1"}}, "pipeline_depth": 10**6}, "pipeline_depth", 10**6),
    ],
)
def test_more_answers_than_the_driver_can_hold(sections: dict[str, Any], field: str, value: int) -> None:
    with pytest.raises(InvalidFieldError, match="answers under way take 9 KiB each") as refusal:
        check_room(config(**sections), 24_000)
    assert (refusal.value.field, refusal.value.value) == (field, value)
    if field != "evaluation.samples":
        check_room(config(**sections), 24_000, training=False)


def test_a_bound_in_flight_bounds_what_is_needed() -> None:
    check_room(config(pipeline_depth=10**6, rollout={"max_in_flight": 1000}), 24_000)


def test_threads_by_the_thousand() -> None:
    check_threads(config(engine={"threads": 64}), 2)
    check_threads(config(engine={"threads": 100}), 128)
    check_threads(config(runtime={"kind": "ray"}, engine={"threads": 1000}), 2)
    with pytest.raises(InvalidFieldError, match="engine.threads: got 65; this machine has 2 CPUs"):
        check_threads(config(engine={"threads": 65}), 2)
    trainer = config(runtime={"trainer_threads": 1000})
    with pytest.raises(InvalidFieldError, match="runtime.trainer_threads: got 1000"):
        check_threads(trainer, 2)
    check_threads(trainer, 2, training=False)


def test_what_fits_exactly_is_let_through() -> None:
    needed = 2 * TORCH_MIB + 3 * TORCH_MIB + 4 * WORKER_MIB
    wanted = config(runtime={"trainer_ranks": 2, "rollout_workers": 4}, engine={"replicas": 3})
    check_room(wanted, needed)
    with pytest.raises(InvalidFieldError):
        check_room(wanted, needed - 1)


@pytest.mark.skipif(not can_fork(), reason="nothing is forked here")
def test_what_is_shared_is_not_asked_for_by_each() -> None:
    wanted = config(runtime={"trainer_ranks": 5, "share_imports": True}, engine={"replicas": 5})
    check_room(wanted, 10 * FORKED_MIB)
    with pytest.raises(InvalidFieldError, match="each takes at least 40 MiB"):
        check_room(wanted, 10 * FORKED_MIB - 1)


@pytest.mark.skipif(not can_fork(), reason="nothing is forked here")
@pytest.mark.parametrize(
    ("sections", "worth"),
    [
        ({}, True),
        ({"runtime": {"share_imports": False}}, False),
        ({"runtime": {"trainer_threads": 2}, "engine": {"threads": 2}}, False),
        ({"engine": {"threads": 2}}, False),
        ({"engine": {"threads": 2}, "runtime": {"trainer_ranks": 2}}, True),
        ({"engine": {"urls": ["http://e:1"]}}, False),
        ({"sync": {"transport": "peer"}}, False),
    ],
)
def test_a_zygote_is_started_only_for_what_it_can_fork(sections: dict[str, Any], worth: bool) -> None:
    runtime = {"share_imports": True, **sections.get("runtime", {})}
    assert worth_a_zygote(config(**{**sections, "runtime": runtime})) is worth


def test_processes_elsewhere_need_no_memory_here() -> None:
    check_room(config(runtime={"kind": "ray", "trainer_ranks": 50, "ray": {"address": "head:6379"}}), 1024)
    check_room(config(engine={"urls": [f"http://e{i}:1" for i in range(50)]}), 1024)
    check_room(config(runtime={"trainer_ranks": 50}), None)


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="no /proc/meminfo here")
def test_this_machine_has_some_memory() -> None:
    found = available_mib()
    assert found is not None
    assert 0 < found < 2**30
