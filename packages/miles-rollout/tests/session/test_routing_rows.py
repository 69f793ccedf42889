"""Rows come out of the text as they went in, whatever slice is taken."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_rollout.routing_rows import RoutingRows


@given(
    rows=st.integers(0, 9),
    layers=st.integers(1, 3),
    top_k=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "uint16", "int32"]),
    data=st.data(),
)
def test_every_slice(rows: int, layers: int, top_k: int, dtype: str, data: st.DataObject) -> None:
    array = np.arange(rows * layers * top_k).astype(dtype).reshape(rows, layers, top_k)
    packed = RoutingRows(base64.b64encode(array.tobytes()).decode(), (rows, layers, top_k), dtype)
    start, stop = data.draw(st.integers(0, rows + 1)), data.draw(st.integers(0, rows + 1))
    assert np.array_equal(packed[start:stop], array[start:stop])
    assert np.array_equal(np.asarray(packed), array)
    assert packed[start:stop].dtype == array.dtype
    assert len(packed) == rows


def test_text_of_another_length_is_refused() -> None:
    text = base64.b64encode(bytes(24)).decode()
    with pytest.raises(InvalidFieldError, match="24 bytes"):
        RoutingRows(text, (3, 2, 1), "int16")
    with pytest.raises(InvalidFieldError, match="one after the other"):
        RoutingRows(text, (3, 2, 2), "int16")[::2]
    with pytest.raises(InvalidFieldError, match="not base64"):
        RoutingRows("!" * 32, (3, 2, 2), "int16")[:]
