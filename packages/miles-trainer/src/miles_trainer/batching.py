"""A step becomes micro-batches of whole trajectories; the loss is the same whatever the split.

Every trained token carries a weight that already contains the step's global denominator, so a micro-batch
only sums. Arrays are numpy and flat: nothing here loops over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError, Trajectory
from miles_trainer.config import Aggregation
from miles_trainer.errors import describe
from miles_trainer.sharing import common_prefixes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Chunks:
    """The N fed tokens of a micro-batch as C runs laid end to end.

    A chunk holds tokens `start` .. `start + length - 1` of trajectory `owner`. The first S chunks belong to the
    S trajectories in order; further ones hold prefixes that several trajectories share.

    Attributes:
        owner: int64 [C].
        start: int64 [C], 0 unless the tokens before are a shared prefix.
        length: int64 [C].
        prefix: int64 [C], the chunk that holds the tokens before `start`, or -1.
    """

    owner: Ints
    start: Ints
    length: Ints
    prefix: Ints


@dataclass(frozen=True)
class MicroBatch:
    """S trajectories laid end to end: N tokens are fed to the model, P are predicted (trained or scored).

    Of each trajectory only the tokens before its last predicted one are fed; what follows cannot matter.

    Attributes:
        trajectories: the S trajectories.
        chunks: how their tokens are laid out.
        token_ids: int64 [N].
        position_ids: int64 [N], position of each token in its own trajectory.
        sources: int64 [P], index into N of the token whose hidden state predicts.
        targets: int64 [P], the predicted ids.
        target_index: int64 [P], index of the predicted token in its own trajectory.
        segments: int64 [P], which of the S trajectories.
        inverse_temperature: float64 [P].
        engine_logprobs: float32 [P], NaN where the engine sampled nothing.
        advantages: float64 [P].
        weights: float64 [P], share of the token in the step's loss.
    """

    trajectories: tuple[Trajectory, ...]
    chunks: Chunks
    token_ids: Ints
    position_ids: Ints
    sources: Ints
    targets: Ints
    target_index: Ints
    segments: Ints
    inverse_temperature: Floats
    engine_logprobs: NDArray[np.float32]
    advantages: Floats
    weights: Floats

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.token_ids.shape[0])


@dataclass(frozen=True)
class TrainBatch:
    """What one rank adds to an update, already normalised over the whole step.

    Attributes:
        micro_batches: of this rank, possibly none.
        num_trained: trained tokens of the whole step.
        num_members: group members of the whole step.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_trained: int
    num_members: int


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` in bins of at most `capacity`; an item that is larger gets a bin of its own.

    Longest first, each into the first bin with room; equal sizes keep their order, so the plan is
    deterministic. Uses at most 11/9 of the optimal number of bins plus one.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        for b in range(first_open, len(bins)):
            if room[b] >= size:
                bins[b].append(index)
                room[b] -= size
                break
        else:
            bins.append([index])
            room.append(capacity - size)
        while first_open < len(room) and room[first_open] <= 0:
            first_open += 1
    return bins


def padded_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Like first_fit_decreasing where a bin costs (longest x number), as padding to the longest does."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if bins and sizes[bins[-1][0]] * (len(bins[-1]) + 1) <= capacity:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def token_weights(
    counts: Ints, members: Ints, num_members: int, aggregation: Aggregation, constant: float | None
) -> Floats:
    """Weight of each trained token of each trajectory, float64 [n]; the loss is the weighted sum of token losses.

    Args:
        counts: trained tokens of each trajectory, [n].
        members: group member of each trajectory, [n].
        num_members: members of the step.
        aggregation: how token losses become one number.
        constant: denominator per member for `Aggregation.CONSTANT`.
    """
    if aggregation is Aggregation.TOKEN:
        return np.full(len(counts), 1.0 / max(int(counts.sum()), 1))
    if aggregation is Aggregation.TRAJECTORY:
        per_member = np.bincount(members, weights=counts, minlength=num_members)
        return 1.0 / (num_members * per_member[members])
    if constant is None:
        raise InvalidFieldError("objective.aggregation_constant", constant, "give it for aggregation 'constant'")
    return np.full(len(counts), 1.0 / (num_members * constant))


def check_trajectories(trajectories: Sequence[Trajectory], vocab_size: int, max_length: int | None) -> None:
    """Refuse ids the model does not know, trajectories it cannot hold and trained tokens without a context.

    Raises:
        InvalidFieldError: naming the trajectory.
    """
    filled = [t for t in trajectories if t.num_tokens]
    if not filled:
        return
    sizes = np.array([t.num_tokens for t in filled])
    firsts = np.cumsum(sizes) - sizes
    # one look at all tokens, since a look at each trajectory costs as much as the rest of the preparation
    highest = np.maximum.reduceat(_concat([t.token_ids for t in filled], np.int32), firsts)
    unknown = highest >= vocab_size
    too_long = sizes > (max_length if max_length is not None else int(sizes.max()))
    no_context = _concat([t.loss_mask for t in filled], np.bool_)[firsts]
    bad = np.flatnonzero(unknown | too_long | no_context)
    if not len(bad):
        return
    index = int(bad[0])
    name = describe(filled[index].identity)
    if unknown[index]:
        remedy = f"the model's vocabulary has {vocab_size} ids; use the tokenizer of the trained model"
        raise InvalidFieldError(f"token_ids of {name}", int(highest[index]), remedy)
    if too_long[index]:
        raise InvalidFieldError(
            f"token_ids of {name}", int(sizes[index]), f"the model holds at most {max_length} tokens"
        )
    raise InvalidFieldError(f"loss_mask of {name}", True, "the first token has no context; do not train it")


def build_micro_batch(
    trajectories: Sequence[Trajectory],
    advantages: Floats | None = None,
    weights: Floats | None = None,
    *,
    share: bool = False,
) -> MicroBatch:
    """Lay trajectories end to end, each up to its last predicted token.

    Args:
        trajectories: S trajectories.
        advantages: float64 [S], or None to predict every token but the first (scoring).
        weights: float64 [S], weight of each trained token; goes with `advantages`.
        share: hold a prefix that trajectories of one prompt have in common only once.
    """
    sizes = np.array([t.num_tokens for t in trajectories], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    token_ids = _concat([t.token_ids for t in trajectories], np.int32).astype(np.int64)
    logprobs = _concat([t.logprobs for t in trajectories], np.float32)
    owner = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    offsets = np.arange(len(token_ids), dtype=np.int64) - starts[owner]
    if advantages is None:
        predicted = np.flatnonzero(offsets > 0)
    else:
        predicted = np.flatnonzero(_concat([t.loss_mask for t in trajectories], np.bool_))
    segments = owner[predicted]
    fed = np.zeros(len(sizes), dtype=np.int64)
    fed[segments] = offsets[predicted]  # the largest offset is written last
    chunks = _chunks(trajectories, fed, share=share)
    places = np.cumsum(chunks.length) - chunks.length
    position_ids = np.arange(int(chunks.length.sum()), dtype=np.int64) + np.repeat(chunks.start - places, chunks.length)
    # where the hidden state before each predicted token is: in the trajectory's own chunk or in its prefix
    before = offsets[predicted] - 1
    own = before >= chunks.start[segments]
    base = np.where(own, places[segments] - chunks.start[segments], places[chunks.prefix[segments]])
    temperatures = np.array([t.sampling.temperature or 1.0 for t in trajectories])
    values = np.zeros(len(sizes)) if advantages is None else advantages
    shares = np.zeros(len(sizes)) if weights is None else weights
    return MicroBatch(
        trajectories=tuple(trajectories),
        chunks=chunks,
        token_ids=token_ids[np.repeat(starts[chunks.owner], chunks.length) + position_ids],
        position_ids=position_ids,
        sources=base + before,
        targets=token_ids[predicted],
        target_index=offsets[predicted],
        segments=segments,
        inverse_temperature=(1.0 / temperatures)[segments],
        engine_logprobs=logprobs[predicted],
        advantages=values[segments],
        weights=shares[segments],
    )


def _chunks(trajectories: Sequence[Trajectory], fed: Ints, *, share: bool) -> Chunks:
    """One chunk a trajectory, and one for each shared prefix behind them."""
    own = np.arange(len(fed), dtype=np.int64)
    if not share:
        return Chunks(owner=own, start=np.zeros_like(fed), length=fed, prefix=np.full_like(fed, -1))
    common, leaders = common_prefixes(trajectories, fed)
    prefixes = np.unique(leaders[common > 0])
    chunk_of = np.full(len(fed), -1, dtype=np.int64)
    chunk_of[prefixes] = len(fed) + np.arange(len(prefixes))
    return Chunks(
        owner=np.concatenate([own, prefixes]),
        start=np.concatenate([common, np.zeros_like(prefixes)]),
        length=np.concatenate([fed - common, common[prefixes]]),
        prefix=np.concatenate([np.where(common > 0, chunk_of[leaders], -1), np.full_like(prefixes, -1)]),
    )


def _concat(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)


def plan(trajectories: Sequence[Trajectory], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Which trajectories share a micro-batch, as indices.

    Packed trajectories of one prompt stay together while they fit, so that they can share it.
    """
    sizes = [t.num_tokens for t in trajectories]
    if padded:
        return padded_bins(sizes, max_tokens)
    families: dict[int, list[int]] = {}
    for index, t in enumerate(trajectories):
        families.setdefault(t.identity.prompt_index, []).append(index)
    units: list[list[int]] = []
    for members in families.values():
        whole = sum(sizes[i] for i in members) <= max_tokens
        units += [members] if whole else [[i] for i in members]
    bins = first_fit_decreasing([sum(sizes[i] for i in unit) for unit in units], max_tokens)
    return [[i for unit in b for i in units[unit]] for b in bins]
