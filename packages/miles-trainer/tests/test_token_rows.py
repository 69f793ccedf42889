"""Slices of routes for ranks and micro-batches: every token's row is where it belongs, and the parts give the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError, RoutingTrace, Trajectory
from miles_trainer import Trainer, TrainerConfig
from miles_trainer.batching import build_micro_batch
from miles_trainer.token_rows import context_rows, place, sequence_rows

lengths_of = st.lists(st.integers(0, 23), min_size=1, max_size=4)
layouts = st.sampled_from(["zigzag", "contiguous"])


def test_the_documented_example() -> None:
    ids = np.arange(7)[:, None]
    held = [place(ids, *context_rows(np.array([7]), 2, rank))[:, 0].tolist() for rank in (0, 1)]
    assert held == [[0, 1, 6, 0], [2, 3, 4, 5]]


def zigzag_by_hand(length: int, ranks: int, rank: int) -> list[int]:
    """Tokens of a rank as the layout is defined: pad, cut into pieces, take two; -1 is padding."""
    size = -(-length // (2 * ranks))
    padded = [*range(length), *([-1] * (2 * ranks * size - length))]
    pieces = [padded[i * size : (i + 1) * size] for i in range(2 * ranks)]
    return pieces[rank] + pieces[2 * ranks - 1 - rank]


@given(lengths_of, st.integers(1, 5))
def test_zigzag_is_the_layout_by_definition(lengths: list[int], ranks: int) -> None:
    starts = np.cumsum([0, *lengths[:-1]])
    for rank in range(ranks):
        rows, num_rows = context_rows(np.array(lengths), ranks, rank)
        want = [
            -1 if offset < 0 else int(start) + offset
            for start, length in zip(starts, lengths, strict=True)
            for offset in zigzag_by_hand(length, ranks, rank)
        ]
        got = np.full(num_rows, -1)
        got[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        assert got.tolist() == want


@given(lengths_of, st.integers(1, 4), st.integers(1, 3), layouts, st.integers(0, 2**32 - 1))
def test_ranks_reassemble_to_the_whole(
    lengths: list[int], context: int, sequence: int, layout: Literal["zigzag", "contiguous"], seed: int
) -> None:
    """Context parallel, each rank's rows cut again by sequence parallel: every token is held once, with its ids."""
    total = sum(lengths)
    ids = np.random.default_rng(seed).integers(0, 256, (3, total, 2)).astype(np.uint8)
    back = np.zeros_like(ids)
    holders = np.zeros(total, dtype=np.int64)
    sizes = set()
    for cp in range(context):
        rows, num_rows = context_rows(np.array(lengths), context, cp, layout=layout)
        for sp in range(sequence):
            local, size = sequence_rows(rows, num_rows, sequence, sp)
            sizes.add(size)
            held = place(ids, local, size)
            assert held.shape == (3, size, 2)
            here = local >= 0
            assert len(set(local[here].tolist())) == here.sum()
            back[:, here] = held[:, local[here]]
            holders += here
    assert len(sizes) == 1
    assert (holders == 1).all()
    assert np.array_equal(back, ids)


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_ranks_that_do_not_exist_are_refused(ranks: int, rank: int) -> None:
    with pytest.raises(InvalidFieldError, match="rank"):
        context_rows(np.array([4]), ranks, rank)
    with pytest.raises(InvalidFieldError, match="rank"):
        sequence_rows(np.arange(4), 4, ranks, rank)


@pytest.fixture(scope="module")
def trainer(model_folder: Callable[..., Path]) -> Trainer:
    return Trainer(model_folder("qwen3_moe"), TrainerConfig(), seed=0)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_micro_batches_hold_each_fed_tokens_own_row(
    trainer: Trainer, make_trajectory: Callable[..., Trajectory], data: st.DataObject
) -> None:
    """Packing, truncation after the last trained token, and prompts that are held once."""
    replayer = trainer.backend.replayer
    assert replayer is not None
    members = []
    for member in range(data.draw(st.integers(1, 4))):
        total = data.draw(st.integers(6, 20))
        t = make_trajectory(prompt=data.draw(st.integers(0, 1)), member=member, total=total, routing=(2, 2, 6))
        mask = t.loss_mask.copy()
        mask[data.draw(st.integers(6, total)) :] = False  # the rest was sampled, but is not trained
        members.append(t.replace(loss_mask=mask))
    if data.draw(st.booleans()):  # the same prompt, with the same routes
        members = [
            m.replace(
                token_ids=np.concatenate([members[0].token_ids[:5], m.token_ids[5:]]),
                routing=RoutingTrace.concat([members[0].routing.slice(0, 5), m.routing.slice(5, m.num_tokens - 1)]),
            )
            for m in members
            if m.routing and members[0].routing
        ]
    ones = np.ones(len(members))
    micro = build_micro_batch(members, ones, ones, share=data.draw(st.booleans()))
    found = replayer.recorded_ids(micro)
    owner = np.repeat(micro.chunks.owner, micro.chunks.length)
    assert found.shape == (2, micro.num_tokens, 2)
    for column, (which, position) in enumerate(zip(owner, micro.position_ids, strict=True)):
        trace = members[int(which)].routing
        assert trace is not None
        assert np.array_equal(found[:, column], trace.expert_ids[position])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_router_on_a_rank_replays_its_own_tokens(
    trainer: Trainer, make_trajectory: Callable[..., Trajectory], rank: int
) -> None:
    """The mixture block on a zig-zag slice gives what the block on the whole gives for those tokens."""
    replayer, model = trainer.backend.replayer, trainer.backend.policy.model
    assert replayer is not None
    members = [make_trajectory(member=i, total=n, routing=(2, 2, 6)) for i, n in enumerate((9, 14))]
    micro = build_micro_batch(members)
    block = model.get_submodule(replayer.routers[1].name.rpartition(".")[0])
    hidden = torch.randn(micro.num_tokens, 32, generator=torch.Generator().manual_seed(0))
    whole = torch.arange(micro.num_tokens)
    with replayer.using(replayer.prepare(micro, whole, micro.num_tokens, replay=True)), torch.no_grad():
        want = block(hidden[None])[0]
    rows, num_rows = context_rows(micro.chunks.length, 3, rank)
    here = rows >= 0
    local = torch.zeros(num_rows, 32)
    local[torch.from_numpy(rows[here])] = hidden[torch.from_numpy(here)]
    use = replayer.prepare(micro, torch.from_numpy(rows), num_rows, replay=True)
    with replayer.using(use), torch.no_grad():
        got = block(local[None])[0]
    torch.testing.assert_close(got[torch.from_numpy(rows[here])], want[torch.from_numpy(here)], rtol=0, atol=2e-5)
    assert use.replayed == int(here.sum())
    assert use.seconds > 0
    chosen = use.chosen[1][torch.from_numpy(rows[here])].numpy()
    assert np.array_equal(chosen, replayer.recorded_ids(micro)[1][here])
