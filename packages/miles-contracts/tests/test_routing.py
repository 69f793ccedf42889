from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import routing_traces

from miles_contracts import InvalidFieldError, RoutingTrace, narrowest_dtype


@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_narrowest_dtype(experts: int, dtype: str) -> None:
    assert narrowest_dtype(experts) == np.dtype(dtype)


def test_published_size() -> None:
    """31,999 rows x 60 layers x top-8 of 256 experts: 61 MB as int32, 15.4 MB in one byte each."""
    ids = np.zeros((31_999, 60, 8), dtype=np.int32)
    assert round(ids.nbytes / 1e6) == 61
    assert RoutingTrace.of(ids, 256).num_bytes == 15_359_520


@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_out_of_range_are_refused_and_never_wrapped(bad: int) -> None:
    with pytest.raises(InvalidFieldError, match=rf"{bad}; ids are in \[0, 4\)"):
        RoutingTrace.of(np.full((1, 1, 1), bad), 4)


def test_wrong_dtype_shape_or_range_at_construction() -> None:
    with pytest.raises(InvalidFieldError, match="uint8"):
        RoutingTrace(expert_ids=np.zeros((1, 1, 1), np.int32), num_experts=4)
    with pytest.raises(InvalidFieldError, match="rows, layers, top_k"):
        RoutingTrace(expert_ids=np.zeros((1, 1), np.uint8), num_experts=4)
    with pytest.raises(InvalidFieldError, match="ids are < 4"):
        RoutingTrace(expert_ids=np.full((1, 1, 1), 9, np.uint8), num_experts=4)
    with pytest.raises(InvalidFieldError, match="at least one expert"):
        narrowest_dtype(0)


@given(routing_traces(), st.data())
def test_slices_concatenate_to_the_whole(trace: RoutingTrace, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, trace.num_tokens))
    parts = [trace.slice(0, cut), trace.slice(cut, trace.num_tokens)]
    assert np.array_equal(RoutingTrace.concat(parts).expert_ids, trace.expert_ids)
    assert np.shares_memory(parts[1].expert_ids, trace.expert_ids) or parts[1].num_tokens == 0


def test_concat_refuses_different_kinds_and_nothing() -> None:
    a = RoutingTrace.of(np.zeros((1, 1, 1), np.int64), 4)
    b = RoutingTrace.of(np.zeros((1, 2, 1), np.int64), 4)
    with pytest.raises(InvalidFieldError, match="must agree"):
        RoutingTrace.concat([a, b])
    with pytest.raises(InvalidFieldError, match="at least one"):
        RoutingTrace.concat([])


def test_slice_outside() -> None:
    trace = RoutingTrace.of(np.zeros((3, 1, 1), np.int64), 4)
    with pytest.raises(InvalidFieldError, match="stay inside"):
        trace.slice(1, 4)
