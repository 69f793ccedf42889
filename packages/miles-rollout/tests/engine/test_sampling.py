"""Drawing tokens: random numbers by counter, exact distributions, each row for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rollout.engine.rng import SeedSource, _mix, uniforms
from miles_rollout.engine.sampling import sample
from miles_rollout.engine.sequence import Sampling, Sequence


def row(seed: int = 0, drawn: int = 0, **params: object) -> Sequence:
    """A sequence that has sampled `drawn` tokens."""
    tokens = np.zeros(1 + 4096, dtype=np.int32)
    sequence = Sequence(
        id="r", tokens=tokens, prompt_length=1, sampling=Sampling(max_new_tokens=4096, seed=seed, **params)
    )
    sequence.length = 1 + drawn
    return sequence


def test_splitmix64_known_values() -> None:
    """First five outputs of SplitMix64 seeded with 1234567, as published with the reference implementation."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.full(5, 1234567, dtype=np.uint64) + np.arange(1, 6, dtype=np.uint64) * golden
    assert _mix(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniforms_depend_on_seed_and_index_only() -> None:
    seeds = np.array([3, 9, 3, 3], dtype=np.uint64)
    indices = np.array([0, 0, 1, 0], dtype=np.uint64)
    numbers = uniforms(seeds, indices)
    assert numbers[0] == numbers[3]
    assert len({float(n) for n in numbers}) == 3
    assert uniforms(seeds[2:3], indices[2:3])[0] == numbers[2]


def test_uniforms_are_uniform_along_seeds_and_along_indices() -> None:
    count = 100_000
    running = np.arange(count, dtype=np.uint64)
    for numbers in (uniforms(np.full_like(running, 5), running), uniforms(running, np.zeros_like(running))):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed = np.bincount((numbers * 100).astype(int), minlength=100)
        chi_square = float(((observed - count / 100) ** 2 / (count / 100)).sum())
        assert chi_square < 170  # 99 degrees of freedom: exceeded once in 10^5 tries
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_fresh_seeds_differ_and_follow_the_root() -> None:
    first, again = SeedSource(11), SeedSource(11)
    seeds = [first.next() for _ in range(1000)]
    assert seeds == [again.next() for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert SeedSource().next() != SeedSource().next()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 1.5, -4.0, 0.0])
    count = 40_000
    ids, logprobs = sample(logits.expand(count, -1), [row(seed=i, temperature=temperature) for i in range(count)])
    exact = torch.softmax(logits.double() / temperature, dim=0).numpy()
    expected = exact * count
    observed = np.bincount(ids, minlength=6)
    assert float(((observed - expected) ** 2 / expected).sum()) < 30  # 5 degrees of freedom
    np.testing.assert_allclose(logprobs, np.log(exact)[ids], atol=1e-6)


def reference_support(probabilities: np.ndarray, top_p: float, top_k: int, min_p: float) -> set[int]:
    """Allowed tokens, said plainly."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    allowed, mass = set(), 0.0
    for rank, token in enumerate(order):
        if (top_k and rank >= top_k) or (top_p < 1 and mass >= top_p):
            break
        if probabilities[token] >= min_p * probabilities[order[0]]:
            allowed.add(token)
        mass += probabilities[token]
    return allowed


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=12, unique=True),
    st.sampled_from([0.3, 0.77, 0.95, 1.0]),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.11, 0.5]),
)
def test_truncation_keeps_exactly_the_allowed_tokens(raw: list[int], top_p: float, top_k: int, min_p: float) -> None:
    logits = torch.tensor(raw, dtype=torch.float32) / 5
    count = 400
    params = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    ids, logprobs = sample(logits.expand(count, -1), [row(seed=i, **params) for i in range(count)])
    probabilities = torch.softmax(logits.double(), dim=0).numpy()
    allowed = reference_support(probabilities, top_p, top_k, min_p)
    assert set(ids) <= allowed
    kept = probabilities[sorted(allowed)].sum()
    likely = {t for t in allowed if probabilities[t] / kept > 0.05}
    assert likely <= set(ids)
    # Log-probs are those before truncation.
    np.testing.assert_allclose(logprobs, np.log(probabilities)[ids], atol=1e-5)


def test_rows_with_different_parameters_do_not_meet() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 64, generator=generator) * 3
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}]
    rows = [row(seed=100 + i, drawn=i, **kinds[i % len(kinds)]) for i in range(40)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]]) for i in range(40)]
    assert together[0] == [ids[0] for ids, _ in alone]
    np.testing.assert_allclose(together[1], [lp[0] for _, lp in alone], atol=1e-6)


def test_greedy_takes_the_best_with_logprobs_of_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, logprobs = sample(logits, [row(temperature=0.0)])
    assert ids == [1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0].double(), 0)[1]), abs=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 5), float("-inf"))
    logits[:, 2] = 0.0
    ids, logprobs = sample(logits, [row(seed=i) for i in range(2000)])
    assert set(ids) == {2}
    assert set(logprobs) == {0.0}


def test_a_broken_row_says_so_and_leaves_others_alone() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 1] = float("nan")
    _, logprobs = sample(logits, [row(), row(seed=1)])
    assert np.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(np.log(0.25), abs=1e-6)
