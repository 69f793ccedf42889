"""Hands the tensors of one bucket, piece by piece, to whoever delivers them, and describes what was delivered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from miles_contracts import ShmTensor, TensorSpec
from miles_sync.buckets import Bucket, Piece
from miles_sync.export import CheckedExport

Deliver = Callable[[Piece, torch.Tensor], str | None]
"""Gets a piece and its flat uint8 bytes on their device; returns their digest, None without digests."""


def fill_bucket(
    bucket: Bucket, export: CheckedExport, deliver: Deliver, *, digests: bool
) -> tuple[tuple[ShmTensor, ...], TensorSpec | None, int]:
    """Deliver the pieces of a bucket in the manifest's order.

    Returns:
        What lies where, with digests; for a part of a split tensor the spec of the whole; the part's first byte.

    Raises:
        WeightUpdateError: the export is not what the plan was made from.
    """
    placed: list[ShmTensor] = []
    part_of: TensorSpec | None = None
    for piece in bucket.pieces:
        data = export.bytes_of(piece.spec)
        digest = deliver(piece, data[piece.start : piece.start + piece.num_bytes])
        name, dtype, shape = piece.spec.name, piece.spec.dtype, piece.spec.shape
        if not piece.whole:
            whole = export.whole_digest(piece.spec) if digests else None
            part_of = TensorSpec(name=name, dtype=dtype, shape=shape, digest=whole)
            dtype, shape = "uint8", (piece.num_bytes,)
        placed.append(
            ShmTensor(spec=TensorSpec(name=name, dtype=dtype, shape=shape, digest=digest), offset=piece.offset)
        )
    return tuple(placed), part_of, bucket.pieces[0].start if part_of is not None else 0
