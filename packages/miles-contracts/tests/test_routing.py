from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from strategies import routing_traces

from miles_contracts import InvalidFieldError, RoutingTrace, narrowest_dtype, row_digests


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


def by_hand(ids: list[int], bits: int, word: int) -> int:
    """The packed form as one long number, bit by bit from the definition of its layout."""
    lanes = next(p for p in range(1, word + 1) if p * bits % word == 0)
    size = -(-len(ids) // lanes)
    number = 0
    for index, value in enumerate(ids):
        lane, j = divmod(index, size)
        for bit in range(bits):
            run, place = divmod(lane * bits + bit, word)
            number |= (value >> bit & 1) << ((run * size + j) * word + place)
    return number


@given(routing_traces())
def test_packed_form_is_exact_and_as_defined(trace: RoutingTrace) -> None:
    words = trace.pack()
    assert words.dtype == trace.expert_ids.dtype
    assert words.nbytes == trace.packed_bytes
    flat, word = trace.expert_ids.reshape(-1).tolist(), 8 * words.itemsize
    assert int.from_bytes(words.tobytes(), "little") == by_hand(flat, trace.bits, word)
    back = RoutingTrace.unpack(words, trace.expert_ids.shape, trace.num_experts)
    assert back.num_experts == trace.num_experts
    assert back.expert_ids.tobytes() == trace.expert_ids.tobytes()
    assert not back.expert_ids.flags.writeable


@given(st.integers(1, 70_000), st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_every_number_of_experts_packs_exactly(experts: int, rows: int, seed: int) -> None:
    """Numbers of experts that leave every filling, and the largest id among them."""
    ids = np.random.default_rng(seed).integers(0, experts, size=(rows, 1, 1))
    if rows:
        ids[-1] = experts - 1
    trace = RoutingTrace.of(ids, experts)
    assert np.array_equal(RoutingTrace.unpack(trace.pack(), ids.shape, experts).expert_ids, ids)


@pytest.mark.parametrize("experts", [2, 8, 128, 512, 60_000])
def test_arrays_larger_than_a_block_pack_exactly(experts: int) -> None:
    ids = np.random.default_rng(0).integers(0, experts, size=(300_001, 3, 2))
    trace = RoutingTrace.of(ids, experts)
    words = trace.pack()
    assert words.nbytes <= trace.bits * ids.size / 8 + 64
    assert np.array_equal(RoutingTrace.unpack(words, ids.shape, experts).expert_ids, ids)


@given(st.sampled_from([3, 8, 128, 300, 70_000]), st.integers(1, 40), st.data())
def test_truncated_overlong_and_damaged_words_are_refused(experts: int, rows: int, data: st.DataObject) -> None:
    trace = RoutingTrace.of(np.zeros((rows, 1, 3), np.int64), experts)
    words, shape = trace.pack(), trace.expert_ids.shape
    for wrong in (words[: data.draw(st.integers(0, len(words) - 1))], np.append(words, words[:1])):
        with pytest.raises(InvalidFieldError, match="take .* words"):
            RoutingTrace.unpack(wrong, shape, experts)
    # every bit set: an id out of range, or a filling that is not zero, unless neither exists
    full = np.full_like(words, np.iinfo(words.dtype).max)
    if experts == 1 << trace.bits and trace.bits * trace.expert_ids.size == 8 * words.nbytes:
        assert (RoutingTrace.unpack(full, shape, experts).expert_ids == experts - 1).all()
        return
    with pytest.raises(InvalidFieldError, match=r"ids are <|filling"):
        RoutingTrace.unpack(full, shape, experts)


def test_unpack_refuses_what_the_trace_could_not_hold() -> None:
    words = RoutingTrace.of(np.zeros((2, 1, 1), np.int64), 8).pack()
    with pytest.raises(InvalidFieldError, match="uint8 words"):
        RoutingTrace.unpack(words.astype(np.uint16), (2, 1, 1), 8)
    with pytest.raises(InvalidFieldError, match="uint8 words"):
        RoutingTrace.unpack([0], (2, 1, 1), 8)  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match="rows, layers, top_k"):
        RoutingTrace.unpack(words, (-2, 1, 1), 8)
    with pytest.raises(InvalidFieldError, match="at most"):
        narrowest_dtype(2**32 + 1)


@pytest.mark.parametrize("experts", [128, 256, 512])
def test_golden_packed_routes(experts: int) -> None:
    """Files written once; the layout may never change, because checkpoints hold it."""
    want = (np.arange(11 * 2 * 3) * 37 % experts).reshape(11, 2, 3)
    path = Path(__file__).parent / "golden" / f"routes_{experts}.bin"
    words = np.frombuffer(path.read_bytes(), narrowest_dtype(experts).newbyteorder("<"))
    assert np.array_equal(RoutingTrace.unpack(words, want.shape, experts).expert_ids, want)
    assert RoutingTrace.of(want, experts).pack().tobytes() == path.read_bytes()


def test_a_trace_is_immutable_and_travels_between_processes() -> None:
    ids = np.arange(6).reshape(3, 1, 2)
    trace = RoutingTrace.of(ids, 300)
    with pytest.raises(AttributeError, match="immutable"):
        trace.num_experts = 7
    with pytest.raises(ValueError, match="read-only"):
        trace.expert_ids[0] = 1
    back = pickle.loads(pickle.dumps(trace))
    assert back.num_experts == 300
    assert np.array_equal(back.expert_ids, ids)
    assert repr(trace) == "RoutingTrace(3 rows, 1 layers, top-2 of 300)"


@given(routing_traces())
def test_row_digests_tell_rows_apart_whatever_their_dtype(trace: RoutingTrace) -> None:
    if trace.num_experts > 65536:
        return
    ids = trace.expert_ids
    found = row_digests(ids)
    assert found.dtype == np.uint64
    assert np.array_equal(found, row_digests(ids.astype(np.int32)))
    want = [xxhash.xxh3_64_intdigest(row.astype("<u2").tobytes()) for row in ids]
    assert found.tolist() == want


@pytest.mark.parametrize("bad", [-1, 65536])
def test_row_digests_refuse_ids_that_do_not_fit(bad: int) -> None:
    with pytest.raises(InvalidFieldError, match="ids < 65536"):
        row_digests(np.full((1, 1, 1), bad))
