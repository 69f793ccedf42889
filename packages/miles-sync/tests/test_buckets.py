from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import DTYPE_BYTES, InvalidFieldError, TensorSpec
from miles_sync import is_expert, plan_buckets

dtypes = st.sampled_from(sorted(DTYPE_BYTES))
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
kinds = st.sampled_from(["mlp.experts.3.up_proj.weight", "mlp.experts.gate_up_proj", "mlp.gate.weight", "norm.weight"])


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    rows = draw(st.lists(st.tuples(kinds, dtypes, shapes), max_size=30))
    return [TensorSpec(name=f"layers.{i}.{kind}", dtype=d, shape=s) for i, (kind, d, s) in enumerate(rows)]


@given(specs=spec_lists(), bucket_bytes=st.integers(64, 20_000), apart=st.booleans())
def test_every_byte_travels_exactly_once_and_no_bucket_is_too_large(
    specs: list[TensorSpec], bucket_bytes: int, apart: bool
) -> None:
    buckets = plan_buckets(specs, bucket_bytes, experts_apart=apart)
    assert [b.index for b in buckets] == list(range(len(buckets)))
    covered: dict[str, int] = {}
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes
        assert bucket.pieces
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % 64 == 0
            assert piece.offset >= end
            end = piece.offset + piece.num_bytes
            assert piece.start == covered.get(piece.spec.name, 0)
            covered[piece.spec.name] = piece.start + piece.num_bytes
            assert piece.whole or len(bucket.pieces) == 1
    assert covered == {s.name: s.num_bytes for s in specs}


@given(specs=spec_lists(), bucket_bytes=st.integers(64, 20_000))
def test_buckets_are_as_full_as_the_order_allows(specs: list[TensorSpec], bucket_bytes: int) -> None:
    capacity = bucket_bytes - bucket_bytes % 64
    buckets = plan_buckets(specs, bucket_bytes)
    for left, right in itertools.pairwise(buckets):
        if not left.split and not right.split:
            end = left.num_bytes + -left.num_bytes % 64
            assert end + right.pieces[0].num_bytes > capacity


@given(specs=spec_lists(), bucket_bytes=st.integers(64, 20_000))
def test_experts_come_last_and_never_share_a_bucket(specs: list[TensorSpec], bucket_bytes: int) -> None:
    kinds_of = [
        {is_expert(p.spec.name) for p in b.pieces} for b in plan_buckets(specs, bucket_bytes, experts_apart=True)
    ]
    assert all(len(kind) == 1 for kind in kinds_of)
    order = [kind.pop() for kind in kinds_of]
    assert order == sorted(order)


def test_a_large_tensor_is_split_along_its_bytes_in_buckets_of_its_own() -> None:
    small = TensorSpec(name="a", dtype="float32", shape=(4,))
    large = TensorSpec(name="b", dtype="bfloat16", shape=(100,))
    tail = TensorSpec(name="c", dtype="float32", shape=(1,))
    buckets = plan_buckets([small, large, tail], 100)
    found = [[(p.spec.name, p.start, p.num_bytes) for p in b.pieces] for b in buckets]
    assert found == [[("a", 0, 16)], [("b", 0, 64)], [("b", 64, 64)], [("b", 128, 64)], [("b", 192, 8)], [("c", 0, 4)]]


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.3.mlp.experts.17.down_proj.weight", True),
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
    ],
)
def test_only_routed_experts_are_experts(name: str, expert: bool) -> None:
    assert is_expert(name) is expert


def test_refuses_a_bucket_below_one_aligned_unit_and_a_name_twice() -> None:
    with pytest.raises(InvalidFieldError, match="bucket_bytes: got 63"):
        plan_buckets([], 63)
    twice = TensorSpec(name="lm_head.weight", dtype="float32", shape=(1,))
    with pytest.raises(InvalidFieldError, match=r"lm_head.weight.*tied"):
        plan_buckets([twice, twice])


@given(specs=spec_lists(), bucket_bytes=st.integers(64, 20_000), split=st.booleans())
def test_packed_buckets_have_no_gaps_and_every_tensor_begins_where_its_dtype_can(
    specs: list[TensorSpec], bucket_bytes: int, split: bool
) -> None:
    covered: dict[str, int] = {}
    for bucket in plan_buckets(specs, bucket_bytes, packed=True, split=split):
        end = 0
        for piece in bucket.pieces:
            assert piece.offset == end
            assert piece.offset % DTYPE_BYTES[piece.spec.dtype] == 0
            assert piece.start == covered.get(piece.spec.name, 0)
            assert piece.whole or split
            end += piece.num_bytes
            covered[piece.spec.name] = piece.start + piece.num_bytes
        assert bucket.num_bytes == end
        assert end <= bucket_bytes or (not split and len(bucket.pieces) == 1)
    assert covered == {s.name: s.num_bytes for s in specs}
