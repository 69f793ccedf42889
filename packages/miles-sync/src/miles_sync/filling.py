"""Writes the tensors of one bucket into host memory, digesting as it copies."""

from __future__ import annotations

from miles_contracts import ShmTensor, TensorSpec
from miles_sync.buckets import Bucket
from miles_sync.export import CheckedExport
from miles_sync.tensors import Bytes, fetch_with_digest


def fill_bucket(
    bucket: Bucket, memory: Bytes, export: CheckedExport, *, digests: bool
) -> tuple[tuple[ShmTensor, ...], TensorSpec | None, int]:
    """Copy a bucket's tensors to their offsets in `memory` (uint8, at least `bucket.num_bytes`).

    Returns:
        What lies where, with digests; for a part of a split tensor the spec of the whole; the part's first byte.

    Raises:
        WeightUpdateError: the export is not what the plan was made from.
    """
    placed: list[ShmTensor] = []
    part_of: TensorSpec | None = None
    for piece in bucket.pieces:
        data = export.bytes_of(piece.spec)
        target = memory[piece.offset : piece.offset + piece.num_bytes]
        digest = fetch_with_digest(data[piece.start : piece.start + piece.num_bytes], target, digests=digests)
        name, dtype, shape = piece.spec.name, piece.spec.dtype, piece.spec.shape
        if not piece.whole:
            whole = export.whole_digest(piece.spec) if digests else None
            part_of = TensorSpec(name=name, dtype=dtype, shape=shape, digest=whole)
            dtype, shape = "uint8", (piece.num_bytes,)
        placed.append(
            ShmTensor(spec=TensorSpec(name=name, dtype=dtype, shape=shape, digest=digest), offset=piece.offset)
        )
    return tuple(placed), part_of, bucket.pieces[0].start if part_of is not None else 0
