"""A prompt in pieces is, in every form, the ids it was made of."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import SamplingParams
from miles_rollout.engine_answers import generate_body
from miles_rollout.token_ids import TokenIds, json_items

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(pieces=st.lists(IDS, max_size=5), start=st.integers(-8, 8), stop=st.integers(-8, 8))
def test_every_form_says_the_same(pieces: list[list[int]], start: int, stop: int) -> None:
    whole = [i for piece in pieces for i in piece]
    ids = TokenIds()
    for piece in pieces:
        ids = ids.extended(np.asarray(piece, np.int32))
    assert list(ids) == whole == msgspec.json.decode(ids.json) == ids.array.tolist()
    assert len(ids) == len(whole)
    assert ids[start:stop] == whole[start:stop]
    assert ids[start:stop:2] == whole[start:stop:2]
    assert ids.crc == zlib.crc32(np.asarray(whole, "<i4").tobytes())
    for at in range(-len(whole), len(whole)):
        assert ids[at] == whole[at]
    for at in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            ids[at]
    if whole:
        assert (ids[0], ids[-1], type(ids[-1])) == (whole[0], whole[-1], int)
    sent = msgspec.json.decode(msgspec.json.encode(generate_body(ids, SamplingParams(), "r")))
    assert sent == msgspec.json.decode(msgspec.json.encode(generate_body(whole, SamplingParams(), "r")))


def test_no_ids_have_no_elements() -> None:
    assert json_items(np.empty(0, np.int32)) == b""
