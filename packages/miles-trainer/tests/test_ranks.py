"""A step is the same on 1, 2 and 3 ranks, and ends on all of them or on none; real processes over gloo."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_work
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import in_group
from rank_work import Case, Outcome, gradient

from miles_contracts import Group
from miles_trainer.errors import (
    NonFiniteError,
    RankFailedError,
    RankGoneError,
    RankLateError,
    RanksDivergedError,
)
from miles_trainer.ranks import OneRank, buckets, fingerprints, meeting_point

Folder = Callable[..., Path]
Groups = Callable[..., list[Group]]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "token": {},
    "trajectory": {"objective": {"aggregation": "trajectory", "dual_clip": 3.0}},
    "constant": {"objective": {"aggregation": "constant", "aggregation_constant": 20.0}},
    "gspo": {"objective": {"kind": "gspo", "aggregation": "trajectory"}},
    "cispo": {"objective": {"kind": "cispo"}},
    "sft": {"objective": {"kind": "sft"}},
    "corrected, with entropy": {
        "objective": {
            "old_logprobs": "recomputed",
            "entropy_coefficient": 0.01,
            "correction": {"kind": "truncate", "mask_level": "geometric", "mask_low": 0.01, "mask_high": 9.0},
        }
    },
    "reference": {"objective": {"kl": {"coefficient": 0.1}}},
    "no clipping of gradients": {"optimizer": {"max_grad_norm": None}},
    "small padded micro-batches": {"batching": {"max_tokens": 40, "packing": "padded"}},
    **{
        name: {"advantage": {"estimator": name}}
        for name in ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "replay": {},
    "replay with a balancing loss": {"replay": {"aux_loss_coefficient": 0.1}},
    "own routing with a balancing loss": {"replay": {"enabled": False, "aux_loss_coefficient": 0.1}},
}
LAYOUT = ("micro_batches", "tokens_fed")
"""Metrics that say how a step was cut."""


@pytest.fixture(scope="module")
def cases(model_folder: Folder, make_groups: Groups) -> dict[str, Case]:
    """Every configuration, in float64."""
    groups = make_groups
    dense = model_folder("qwen3", dtype="float64")
    made: dict[str, Case] = {name: (dense, groups(num=3, size=4), config) for name, config in CONFIGURATIONS.items()}
    mixture = model_folder("qwen3_moe", dtype="float64")
    routed = groups(num=2, size=3, routing=(2, 2, 6))
    made |= {name: (mixture, routed, config) for name, config in MIXTURES.items()}
    # two trajectories: of three ranks one has nothing to do
    made["fewer trajectories than ranks"] = (dense, groups(num=1, size=2), {})
    made["fewer, of a mixture"] = (
        mixture,
        groups(num=1, size=2, routing=(2, 2, 6)),
        MIXTURES["replay with a balancing loss"],
    )
    return made


@pytest.fixture(scope="module")
def outcomes(cases: dict[str, Case]) -> dict[int, list[list[Outcome]]]:
    """By size of the group and rank: what every case gave."""
    work = list(cases.values())
    found = {size: in_group(size, rank_work.steps, work) for size in (2, 3)}
    for results in found.values():
        for result in results:
            assert isinstance(result, list), result
    return {1: [rank_work.alone(work)], **found}


@pytest.mark.parametrize("size", [2, 3])
def test_loss_gradients_metrics_and_weights_are_those_of_one_rank(
    cases: dict[str, Case], outcomes: dict[int, list[list[Outcome]]], size: int
) -> None:
    for index, name in enumerate(cases):
        one = outcomes[1][0][index]
        for rank, results in enumerate(outcomes[size]):
            got, where = results[index], f"{name}, rank {rank}"
            assert got.metrics.keys() == one.metrics.keys(), where
            for key, value in one.metrics.items():
                if key not in LAYOUT:
                    assert got.metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), f"{where}: {key}"
            assert got.gradients.keys() == one.gradients.keys(), where
            for key, array in one.gradients.items():
                np.testing.assert_allclose(got.gradients[key], array, rtol=1e-8, atol=1e-11, err_msg=f"{where}: {key}")
            for key, array in one.weights.items():
                # Adam divides by the root of the second moment: where a gradient is 0 but for rounding, so is its sign
                np.testing.assert_allclose(got.weights[key], array, rtol=0, atol=2e-6, err_msg=f"{where}: {key}")
            for key, array in outcomes[size][0][index].weights.items():
                assert np.array_equal(results[index].weights[key], array), f"{where}: {key} differs from rank 0"


def test_a_case_can_fail(cases: dict[str, Case], outcomes: dict[int, list[list[Outcome]]]) -> None:
    """The cases differ from each other, so equal results are not equal for want of an effect."""
    norms = {name: outcomes[1][0][index].metrics["grad_norm"] for index, name in enumerate(cases)}
    dense = [
        norms[name] for name in CONFIGURATIONS if name not in ("no clipping of gradients", "small padded micro-batches")
    ]
    assert len({round(norm, 9) for norm in dense}) >= len(dense) - 2


def test_a_run_goes_on_from_a_checkpoint_with_as_many_ranks_or_others(
    model_folder: Folder, make_groups: Groups, tmp_path: Path
) -> None:
    folder = model_folder("qwen3")
    batches = [make_groups(num=2, size=4, seed=seed) for seed in range(4)]
    halfway, there = tmp_path / "halfway", tmp_path / "there"
    whole = in_group(2, rank_work.train, folder, batches, None, tmp_path / "whole")
    in_group(2, rank_work.train, folder, batches[:2], None, halfway)
    resumed = in_group(2, rank_work.train, folder, batches[2:], halfway, there)
    for name, array in whole[0].items():
        assert np.array_equal(resumed[0][name], array), name
        assert np.array_equal(resumed[1][name], array), name
    optimizer = "optimizer.safetensors"
    assert (there / optimizer).read_bytes() == (tmp_path / "whole" / optimizer).read_bytes()
    fewer = rank_work.train(OneRank(), folder, batches[2:], halfway, tmp_path / "fewer")
    for name, array in whole[0].items():
        np.testing.assert_allclose(fewer[name], array, rtol=0, atol=1e-4, err_msg=name)


def test_each_rank_draws_its_own_random_numbers_and_the_same_again(model_folder: Folder, make_groups: Groups) -> None:
    batches = [make_groups(num=2, size=2, seed=seed) for seed in range(2)]
    first, again = (in_group(2, rank_work.noise, model_folder("qwen3"), batches) for _ in range(2))
    assert first == again
    drawn = [number for numbers in first for number in numbers]
    assert len(set(drawn)) == len(drawn) == 4


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_of_one_rank_ends_the_step_on_all_and_changes_nothing(
    model_folder: Folder, make_groups: Groups, victim: int
) -> None:
    results = in_group(2, rank_work.misfortune, model_folder("qwen3"), make_groups(), victim, "bug")
    for rank, (error, changed, following) in enumerate(results):
        assert isinstance(error, KeyError if rank == victim else RankFailedError)
        assert "lost key" in str(error)
        assert not changed
        assert following == 1, "the next step is done as if nothing had been"
    assert f"trainer rank {victim} failed with KeyError" in str(results[1 - victim][0])


def test_what_is_not_finite_is_named_on_all_ranks(model_folder: Folder, make_groups: Groups) -> None:
    groups = make_groups()
    reports = in_group(2, rank_work.nan_weight, model_folder("qwen3"), groups)
    assert all(isinstance(error, NonFiniteError) for error in reports)
    assert reports[0].report == reports[1].report
    assert reports[0].report.what == "logprob"
    assert reports[0].report.identity is not None
    results = in_group(2, rank_work.misfortune, model_folder("qwen3"), groups, 1, "nan gradient")
    for error, changed, following in results:
        assert isinstance(error, NonFiniteError)
        assert not changed
        assert following == 1
        assert len(error.report.candidates) == sum(len(group.trajectories) for group in groups), "of all ranks"


def test_a_killed_rank_is_noticed_at_once(model_folder: Folder, make_groups: Groups) -> None:
    results = in_group(3, rank_work.misfortune, model_folder("qwen3"), make_groups(), 1, "kill", waited_for=(0,))
    error, changed, following = results[0]
    assert isinstance(error, RankGoneError), error
    assert not changed
    assert isinstance(following, RankGoneError), "a group that lost a rank trains no more"


def test_a_rank_that_hangs_is_named(model_folder: Folder, make_groups: Groups) -> None:
    results = in_group(
        2, rank_work.misfortune, model_folder("qwen3"), make_groups(), 1, "hang", timeout_s=3, waited_for=(0,)
    )
    error, changed, _ = results[0]
    assert isinstance(error, RankLateError), error
    assert "did not come within 3 s" in str(error)
    assert "its part of the step" in str(error)
    assert not changed


def test_ranks_whose_weights_differ_by_a_bit_are_stopped(model_folder: Folder, make_groups: Groups) -> None:
    results = in_group(3, rank_work.misfortune, model_folder("qwen3"), make_groups(), 2, "bit flip")
    for error, _, _ in results:
        assert isinstance(error, RanksDivergedError)
        assert "trainer ranks [2] differ from those of rank 0, in model.embed_tokens.weight" in str(error)


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 10**9])
def test_gradients_are_summed_in_buckets(bucket_bytes: int) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5), (4,), (2,), (7, 2, 3), (), (600,), (1000,), (17, 9)]
    results = in_group(2, rank_work.sums, shapes, bucket_bytes)
    for found in results:
        for index, shape in enumerate(shapes):
            dtype = torch.float64 if index % 3 == 2 else torch.float32
            parts = [g for g in (gradient(index, rank, shape, dtype) for rank in range(2)) if g is not None]
            if not parts:
                assert found[index] is None
                continue
            assert found[index].dtype == parts[0].numpy().dtype
            np.testing.assert_array_equal(found[index], sum(parts).numpy())


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 50), max_size=30), limit=st.integers(1, 400))
def test_buckets_hold_all_in_order_and_keep_to_their_size(sizes: list[int], limit: int) -> None:
    masters = [torch.zeros(n, dtype=torch.float64 if n % 5 == 0 else torch.float32) for n in sizes]
    made = [list(bucket) for bucket in buckets(masters, limit)]
    assert [id(m) for bucket in made for m in bucket] == [id(m) for m in masters]
    for bucket in made:
        assert len({m.dtype for m in bucket}) == 1
        assert len(bucket) == 1 or sum(m.nbytes for m in bucket) <= limit


def test_a_meeting_point_is_open_at_its_own_address_alone() -> None:
    store = meeting_point("127.0.0.1", timeout_s=5)
    meeting_point("127.0.0.1", store.port, timeout_s=5).set("key", "value")
    assert store.get("key") == b"value"
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", store.port))


def test_a_meeting_point_that_is_not_there_has_a_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RankLateError, match=rf"cannot be reached at 127\.0\.0\.1:{port}"):
        meeting_point("127.0.0.1", port, timeout_s=0.5)


def test_a_fingerprint_sees_every_bit() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    tensors = {str(index): torch.randn(5, 3).to(dtype) for index, dtype in enumerate(kinds)}
    for name, tensor in tensors.items():
        other = copy.deepcopy(tensors)
        flat = other[name].view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        flat[1] ^= 1
        found, expected = fingerprints(other), fingerprints(tensors)
        assert [n for n in tensors if found[n] != expected[n]] == [name]
    assert fingerprints(tensors) == fingerprints(copy.deepcopy(tensors))
    assert fingerprints({}) == {}
