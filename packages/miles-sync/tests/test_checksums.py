"""Checksums of what ranks are to store, against hashes of the whole stored tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError, TensorSpec, WeightUpdateError
from miles_sync.checksums import ParameterSums
from miles_sync.convert import scatter
from miles_sync.layout import Fragment, Layout, RankBuilder, RankLayout, Slice
from miles_sync.tensors import spec_of

MUCH = 1 << 30


def checksum(tensor: torch.Tensor) -> str:
    """As SGLang does it on the CPU: 8 bytes of the SHA-256 of the contiguous bytes."""
    data = torch.stack([tensor]).reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).digest()[:8].hex()


def sums_of(ranks: tuple[RankLayout, ...], tensors: Mapping[str, torch.Tensor], backlog: int = MUCH) -> ParameterSums:
    sums = ParameterSums(ranks, backlog)
    assert list(sums.tap(tensors.items())) == list(tensors.items())
    return sums


def experts(count: int, rows: int = 2, columns: int = 8) -> dict[str, torch.Tensor]:
    """Gate, up and down of experts, sorted by name as they are sent: 0, 1, 10, 11, 2 ..."""
    made = {}
    for e in range(count):
        made |= {f"{e}.gate": torch.randn(rows, columns), f"{e}.up": torch.randn(rows, columns)}
        made[f"{e}.down"] = torch.randn(columns, rows)
    return dict(sorted(made.items()))


def fused(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> RankLayout:
    count = len(tensors) // 3

    def cut(name: str, dim: int = 0) -> Slice:
        return Slice(spec=spec_of(name, tensors[name]), dim=dim, index=rank, count=ranks)

    builder = RankBuilder()
    builder.stack("w13", [[cut(f"{e}.gate"), cut(f"{e}.up")] for e in range(count)])
    builder.stack("w2", [[cut(f"{e}.down", 1)] for e in range(count)])
    return builder.build()


@given(
    count=st.integers(1, 13),
    ranks=st.sampled_from([1, 2]),
    order=st.randoms(use_true_random=False),
    backlog=st.sampled_from([1, 100, MUCH]),
)
def test_any_order_gives_the_hash_of_the_whole(count: int, ranks: int, order, backlog: int) -> None:
    tensors = experts(count)
    layouts = tuple(fused(tensors, rank, ranks) for rank in range(ranks))
    shuffled = list(tensors.items())
    order.shuffle(shuffled)
    sums = sums_of(layouts, dict(shuffled), backlog)
    whole = Layout(tensors=tuple(spec_of(n, t) for n, t in tensors.items()), ranks=layouts)
    expected = [{n: checksum(t) for n, t in scatter(whole, rank, tensors).items()} for rank in range(ranks)]
    assert sums.result() == expected
    assert sums.num_bytes == sum(t.numel() * 4 for t in tensors.values())
    sums.close()


def test_only_parts_before_their_turn_are_held() -> None:
    tensors = experts(12)
    one = sum(tensors[n].numel() * 4 for n in ("0.gate", "0.up", "0.down"))
    sums = sums_of((fused(tensors, 0, 1),), tensors)
    sums.result()
    # 0, 1, 10, 11, 2: the last two wait until 9 has come, with nothing else but the tensor that is being taken
    assert 2 * one <= sums.peak_bytes <= 3 * one
    in_order = dict(sorted(tensors.items(), key=lambda item: (int(item[0].partition(".")[0]), item[0])))
    straight = sums_of((fused(tensors, 0, 1),), in_order)
    straight.result()
    assert straight.peak_bytes <= one


def test_what_several_ranks_store_alike_is_hashed_once() -> None:
    tensor = torch.randn(5, 3)
    builder = RankBuilder()
    builder.keep(spec_of("a", tensor))
    sums = sums_of((builder.build(),) * 4, {"a": tensor})
    assert sums.result() == [{"a": checksum(tensor)}] * 4
    assert sums.num_bytes == 60


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 2, 3)])
def test_shapes_casts_and_strides(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(*shape, 2)[..., 0]  # every second element of its memory
    for dtype in ("float32", "bfloat16"):
        builder = RankBuilder()
        builder.keep(TensorSpec(name="a", dtype=dtype, shape=shape))
        assert sums_of((builder.build(),), {"a": tensor}).result() == [
            {"a": checksum(tensor.to(getattr(torch, dtype)))}
        ]


def test_padding_is_zero() -> None:
    tensor = torch.randn(3, 2)
    spec = TensorSpec(name="p", dtype="float32", shape=(9, 2))
    place = Fragment(name="a", start=(1, 0), shape=(2, 2), stored="p", at=(4, 0))
    expected = torch.zeros(9, 2)
    expected[4:6] = tensor[1:]
    empty = TensorSpec(name="none", dtype="float32", shape=(2, 2))
    (found,) = sums_of((RankLayout(stored=(spec, empty), fragments=(place,)),), {"a": tensor}).result()
    assert found == {"p": checksum(expected), "none": checksum(torch.zeros(2, 2))}


def test_a_tensor_that_did_not_come_is_named() -> None:
    tensors = experts(2)
    layout = fused(tensors, 0, 1)
    del tensors["1.up"]
    with pytest.raises(WeightUpdateError, match=r"not among the tensors that were sent") as caught:
        sums_of((layout,), tensors).result()
    assert caught.value.tensor == "1.up"


def test_a_part_in_scattered_bytes_is_refused() -> None:
    spec = TensorSpec(name="p", dtype="float32", shape=(4, 4))
    place = Fragment(name="a", start=(0, 0), shape=(2, 2), stored="p", at=(0, 2))
    with pytest.raises(InvalidFieldError, match="a must lie in consecutive bytes"):
        ParameterSums((RankLayout(stored=(spec,), fragments=(place,)),), MUCH)


def test_what_goes_wrong_while_hashing_is_told_to_whoever_asks() -> None:
    builder = RankBuilder()
    builder.keep(TensorSpec(name="a", dtype="float32", shape=(4, 4)))
    sums = ParameterSums((builder.build(),), MUCH)
    sums.put("a", torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        sums.result()


def test_an_update_that_is_given_up_leaves_nothing_behind() -> None:
    tensors = experts(3)
    sums = sums_of((fused(tensors, 0, 1),), tensors)
    sums.close()
    sums.close()
