"""What a run asks of a Ray cluster, as data; Ray itself is not needed for any of this."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_toy.recipe import RECIPE

from miles_contracts import InvalidFieldError
from miles_loop.arguments import config_for, parse
from miles_loop.config import RayPlacement, RunConfig, RuntimeKind
from miles_loop.ray_runtime.placement import Bundle, plan, shortage
from miles_loop.runtime import require_runtime


def config(*words: str) -> RunConfig:
    """What a command line of the toy recipe means."""
    return config_for(RECIPE, parse(list(words), ()))


def test_short_options() -> None:
    made = config("--runtime", "ray", "--address", "10.0.0.1:6379").runtime
    assert (made.kind, made.ray.address) == (RuntimeKind.RAY, "10.0.0.1:6379")
    assert config().runtime.kind is RuntimeKind.LOCAL


def test_an_address_without_the_runtime_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="choose --runtime ray"):
        config("--address", "auto")
    with pytest.raises(InvalidFieldError, match=r"runtime\.kind"):
        config("--runtime", "slurm")


def test_environment_variables_are_text_also_when_they_look_like_numbers() -> None:
    made = config("--runtime.ray.env.NCCL_DEBUG", "INFO", "--runtime.ray.env.OMP_NUM_THREADS", "2").runtime.ray
    assert made.env == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_a_missing_ray_is_named_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def nothing(name: str, package: str | None = None) -> None:
        found.append(name)

    require_runtime(config())
    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(InvalidFieldError, match=r"miles-loop\[ray\]"):
        require_runtime(config("--runtime", "ray"))
    assert found == ["ray"]


def test_ray_is_not_imported_unless_it_is_chosen() -> None:
    code = (
        "import sys, miles_loop.runtime, miles_loop.run_session, miles_loop.command, miles_loop.ray_runtime.placement\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'ray']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_bundle_an_actor_the_trainers_first() -> None:
    words = ("--engine.replicas", "2", "--engine.threads", "3", "--runtime.ray.engine_gpus", "4")
    words += ("--runtime.ray.trainer_gpus", "8", "--runtime.ray.trainer_cpus", "16")
    made = config(*words, "--runtime.ray.trainer_resources.big", "0.5")
    bundles = plan(made, engines=2, trainer=True)
    assert [b.name for b in bundles] == ["trainer", "engine-0", "engine-1"]
    assert [b.resources for b in bundles] == [
        {"CPU": 16, "GPU": 8, "big": 0.5},
        {"CPU": 3, "GPU": 4},
        {"CPU": 3, "GPU": 4},
    ]
    assert [b.name for b in plan(made, engines=1, trainer=False)] == ["engine-0"]
    assert plan(made, engines=0, trainer=False) == []


def test_rollout_workers_are_placed_last_and_there_is_one_unless_told_otherwise() -> None:
    ray = config("--runtime", "ray")
    assert (ray.rollout_workers, config().rollout_workers) == (1, 0)
    assert config("--runtime", "ray", "--rollout.workers", "0").rollout_workers == 0
    made = config(
        "--rollout.workers", "2", "--runtime.ray.rollout_cpus", "0.5", "--runtime.ray.rollout_resources.io", "1"
    )
    bundles = plan(made, engines=1, trainer=True, workers=made.rollout_workers)
    assert [b.name for b in bundles] == ["trainer", "engine-0", "rollout-0", "rollout-1"]
    assert bundles[-1].resources == {"CPU": 0.5, "io": 1}
    assert plan(ray, engines=0, trainer=False, workers=1)[0].resources == {"CPU": 1}


def test_each_trainer_rank_has_a_bundle_of_its_own() -> None:
    made = config("--trainer.ranks", "3", "--trainer.device", "cuda", "--runtime.trainer_threads", "2")
    bundles = plan(made, engines=1, trainer=True)
    assert [b.name for b in bundles] == ["trainer", "trainer-1", "trainer-2", "engine-0"]
    assert all(b.resources == {"CPU": 2, "GPU": 1} for b in bundles[:3])
    assert [b.name for b in plan(made, engines=1, trainer=False)] == ["engine-0"]
    only = shortage(bundles[1:], [{"CPU": 8.0}], RayPlacement.PACK)
    assert only == "no node has 2 CPU, 1 GPU for trainer-1; the nodes have 8 CPU"


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ((), {"trainer": 0, "engine-0": 0}),
        (("--engine.kind", "sglang", "--engine.sglang.device", "cpu"), {"trainer": 0, "engine-0": 0}),
        (("--engine.kind", "sglang", "--engine.sglang.tensor_parallel", "4"), {"trainer": 1, "engine-0": 4}),
        (("--engine.kind", "sglang", "--trainer.device", "cpu"), {"trainer": 0, "engine-0": 1}),
        (("--trainer.device", "cuda:0"), {"trainer": 1, "engine-0": 0}),
        (("--trainer.device", "cuda", "--runtime.ray.trainer_gpus", "0"), {"trainer": 0, "engine-0": 0}),
    ],
)
def test_gpus_follow_from_the_target(words: tuple[str, ...], gpus: dict[str, int]) -> None:
    assert {b.name: b.gpus for b in plan(config(*words), engines=1, trainer=True)} == gpus


@pytest.mark.parametrize(
    ("placement", "bundles", "nodes", "says"),
    [
        ("pack", [(1, 1)], [{"CPU": 4.0}], "no node has 1 CPU, 1 GPU for b0; the nodes have 4 CPU"),
        ("pack", [(3, 0), (3, 0)], [{"CPU": 4.0}], "the run wants 6 CPU, the cluster has 4 CPU"),
        ("strict_pack", [(3, 0), (3, 0)], [{"CPU": 4.0}, {"CPU": 4.0}], "strict_pack wants 6 CPU on one node"),
        ("strict_spread", [(1, 0), (1, 0)], [{"CPU": 4.0}], "strict_spread wants 2 nodes, the cluster has 1"),
        ("pack", [(1, 0)], [], "no node is alive"),
        ("pack", [(1, 0)], [{"memory": 5.0, "node:10.0.0.1": 1.0}], "the nodes have nothing"),
    ],
)
def test_what_is_missing_is_named(placement: str, bundles: list[Any], nodes: list[Any], says: str) -> None:
    found = shortage(
        [Bundle(name=f"b{i}", cpus=cpus, gpus=gpus) for i, (cpus, gpus) in enumerate(bundles)],
        nodes,
        RayPlacement(placement),
    )
    assert found is not None
    assert says in found


amounts = st.integers(1, 40).map(lambda tenths: tenths / 10)


@settings(deadline=None)
@given(
    homes=st.lists(st.lists(st.tuples(amounts, st.integers(0, 2)), max_size=3), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    data=st.data(),
)
def test_bundles_that_fit_are_never_called_a_shortage(homes: list[Any], spare: int, data: st.DataObject) -> None:
    """Nodes are made around bundles that are at home on them, so that a placement exists."""
    bundles = [
        Bundle(name=f"b{i}.{j}", cpus=cpus, gpus=gpus)
        for i, home in enumerate(homes)
        for j, (cpus, gpus) in enumerate(home)
    ]
    nodes = [{"CPU": sum(c for c, _ in home) + spare, "GPU": float(sum(g for _, g in home))} for home in homes]
    order = data.draw(st.permutations(bundles))
    fitting = [RayPlacement.PACK, RayPlacement.SPREAD]
    if sum(bool(home) for home in homes) <= 1:
        fitting.append(RayPlacement.STRICT_PACK)
    if all(len(home) <= 1 for home in homes):
        fitting.append(RayPlacement.STRICT_SPREAD)
    for placement in fitting:
        assert shortage(order, nodes, placement) is None
