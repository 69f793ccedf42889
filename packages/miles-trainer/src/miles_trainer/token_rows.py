"""Which row of a rank's input holds each token, when ranks share the tokens of a micro-batch.

Recorded routes lie by token; a router sees rows. Everything that moves, drops or pads tokens between the two is one
array: `rows[i]` is the row of token i in the flattened input of this rank, -1 when another rank holds it. Rows that
belong to no token are padding.

Context parallel, zig-zag: each trajectory is padded to 2 * ranks equal pieces, and rank r holds pieces r and
2 * ranks - 1 - r, so that causal attention costs every rank the same. Two ranks, one trajectory of 7 tokens:

    pieces   0 1 | 2 3 | 4 5 | 6 .        rank 0: 0 1 6 .      rank 1: 2 3 4 5

Sequence parallel: the rows (of a context-parallel rank, or of all) are padded and cut into equal runs.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError

Ints = NDArray[np.int64]


def context_rows(
    lengths: Ints, ranks: int, rank: int, *, layout: Literal["zigzag", "contiguous"] = "zigzag"
) -> tuple[Ints, int]:
    """Rows of the tokens of trajectories laid end to end, each cut among the ranks by itself.

    Args:
        lengths: tokens of each trajectory, [S].
        ranks: size of the context-parallel group.
        rank: which of them.
        layout: `zigzag`, or `contiguous` for one run of each trajectory a rank.

    Returns:
        int64 [sum of lengths], the row of each token or -1; and the number of rows, padding included, which is the
        same on every rank.
    """
    _check(ranks, rank)
    pieces = 2 * ranks if layout == "zigzag" else ranks
    lengths = np.asarray(lengths, dtype=np.int64)
    sizes = -(-lengths // pieces)  # tokens in a piece of each trajectory
    mine = (rank, pieces - 1 - rank) if layout == "zigzag" else (rank,)
    held = sizes * len(mine)
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(int(lengths.sum()), dtype=np.int64) - starts[owner]
    size = np.maximum(sizes, 1)[owner]
    piece = offset // size
    first = (np.cumsum(held) - held)[owner]
    rows = np.full(len(offset), -1, dtype=np.int64)
    for place, which in enumerate(mine):
        here = piece == which
        rows[here] = (first + place * size + offset % size)[here]
    return rows, int(held.sum())


def sequence_rows(rows: Ints, num_rows: int, ranks: int, rank: int) -> tuple[Ints, int]:
    """Rows of a sequence-parallel rank, from those of the whole input that its group shares.

    Args:
        rows: row of each token in the whole input, or -1, [N].
        num_rows: rows of the whole input.
        ranks: size of the group.
        rank: which of them.

    Returns:
        As `context_rows`.
    """
    _check(ranks, rank)
    size = -(-num_rows // ranks)
    local = rows - rank * size
    return np.where((rows >= 0) & (local >= 0) & (local < size), local, -1), size


def _check(ranks: int, rank: int) -> None:
    if ranks < 1:
        raise InvalidFieldError("ranks", ranks, "a group has at least one rank")
    if not 0 <= rank < ranks:
        raise InvalidFieldError("rank", rank, f"ranks are 0 .. {ranks - 1}")


def place(values: NDArray[Any], rows: Ints, num_rows: int) -> NDArray[Any]:
    """Values of tokens [.., N, k] as a rank's rows hold them, [.., num_rows, k]; zeros where there is padding."""
    here = rows >= 0
    out = np.zeros((*values.shape[:-2], num_rows, values.shape[-1]), dtype=values.dtype)
    out[..., rows[here], :] = values[..., here, :]
    return out
