from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_fleet import same_bits
from sync_layouts import EXPERTS, HEAD, HIDDEN, INTER, KV_HEADS, VOCAB, engine, everything, fsdp, specs, weights

from miles_contracts import InvalidFieldError, TensorSpec
from miles_sync.convert import gather, scatter
from miles_sync.layout import Fragment, Layout, RankBuilder, RankLayout, Slice, split, whole
from miles_sync.transfer import TransferPlan, aligned_runs, minimum_bytes, plan_transfers, runs

LAYOUTS = everything()
names = st.sampled_from(sorted(LAYOUTS))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_scattering_and_gathering_give_back_every_bit(name: str) -> None:
    layout, model = LAYOUTS[name], weights()
    stored = [scatter(layout, rank, model) for rank in range(len(layout.ranks))]
    assert same_bits(gather(layout, stored), model)


def test_fused_tensors_are_the_concatenations_that_engines_use() -> None:
    model = weights()
    rank1 = scatter(engine(2), 1, model)
    at, half = "model.layers.0", slice(None)
    q, k, v = (model[f"{at}.self_attn.{x}_proj.weight"].chunk(2)[1] for x in "qkv")
    assert torch.equal(rank1[f"{at}.self_attn.qkv_proj.weight"], torch.cat([q, k, v]))
    assert torch.equal(rank1[f"{at}.self_attn.o_proj.weight"], model[f"{at}.self_attn.o_proj.weight"].chunk(2, 1)[1])
    experts = [
        torch.cat([model[f"{at}.mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up")])
        for e in range(EXPERTS // 2, EXPERTS)
    ]
    assert torch.equal(rank1[f"{at}.mlp.experts.gate_up_proj"], torch.stack(experts)[half])
    assert rank1[f"{at}.mlp.experts.gate_up_proj"].shape == (EXPERTS // 2, 2 * INTER, HIDDEN)
    rows = -(-VOCAB // 2)
    expected = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
    expected[: VOCAB - rows] = model["model.embed_tokens.weight"][rows:]
    assert torch.equal(rank1["model.embed_tokens.weight"], expected)


def test_interleaved_qkv_deals_one_group_after_the_other() -> None:
    model = weights()
    at = "model.layers.1.self_attn"
    got = scatter(engine(1, interleaved=True), 0, model)[f"{at}.qkv_proj.weight"]
    q = model[f"{at}.q_proj.weight"].reshape(KV_HEADS, -1, HIDDEN)
    k, v = (model[f"{at}.{x}_proj.weight"].reshape(KV_HEADS, HEAD, HIDDEN) for x in "kv")
    assert torch.equal(got, torch.cat([q, k, v], dim=1).reshape(-1, HIDDEN))


def test_a_tied_head_that_the_engine_stores_twice_gets_the_embedding_twice() -> None:
    stored = scatter(engine(4, expert_parallel=False, tied_head=True), 2, weights())
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


@given(size=st.integers(0, 50), count=st.integers(1, 9))
def test_parts_are_those_of_torch_chunk(size: int, count: int) -> None:
    expected = [len(c) for c in torch.arange(size).chunk(count)] if size else []
    parts = [split(size, index, count) for index in range(count)]
    assert [length for _, length, _ in parts if length] == [n for n in expected if n]
    assert [start for start, length, _ in parts if length] == [sum(expected[:i]) for i in range(len(expected))]
    assert {kept for _, _, kept in (split(size, i, count, padded=True) for i in range(count))} == {-(-size // count)}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def deliver(
    plan: TransferPlan, source: Layout, target: Layout, model: dict[str, torch.Tensor]
) -> list[dict[str, bytearray]]:
    """Run the plan on bytes, and count how often each byte is written."""
    have = [{n: raw(t) for n, t in scatter(source, r, model).items()} for r in range(len(source.ranks))]
    got = [{s.name: bytearray(s.num_bytes) for s in rank.stored} for rank in target.ranks]
    written = [{s.name: bytearray(s.num_bytes) for s in rank.stored} for rank in target.ranks]
    for t in plan.transfers:
        source_spec = next(s for s in source.ranks[t.source].stored if s.name == t.source_stored)
        target_spec = next(s for s in target.ranks[t.target].stored if s.name == t.target_stored)
        froms, tos, length = aligned_runs(t, source_spec, target_spec)
        assert len(froms) * length == t.num_bytes
        for a, b in zip(froms.tolist(), tos.tolist(), strict=True):
            got[t.target][t.target_stored][b : b + length] = have[t.source][t.source_stored][a : a + length]
            for i in range(b, b + length):
                written[t.target][t.target_stored][i] += 1
    for rank, layout in zip(written, target.ranks, strict=True):
        assert max((max(counts, default=0) for counts in rank.values()), default=0) <= 1
        expected = sum(f.num_elements * (4 if "norm" in f.name or "scale" in f.name else 2) for f in layout.fragments)
        assert sum(sum(counts) for counts in rank.values()) == expected
    return got


divided = st.sampled_from([1, 30, 200, 2**20])


@settings(max_examples=60, deadline=None)
@given(source_name=names, target_name=names, divided_bytes=divided)
def test_a_plan_writes_every_byte_of_every_shard_exactly_once_and_they_are_the_right_ones(
    source_name: str, target_name: str, divided_bytes: int
) -> None:
    source, target, model = LAYOUTS[source_name], LAYOUTS[target_name], weights(1)
    plan = plan_transfers(source, target, divided_bytes)
    got = deliver(plan, source, target, model)
    for rank, stored in enumerate(got):
        for name, tensor in scatter(target, rank, model).items():
            assert bytes(stored[name]) == raw(tensor)
    assert plan.num_bytes == minimum_bytes(target)
    for received, layout in zip(plan.received(len(target.ranks)), target.ranks, strict=True):
        assert received <= layout.num_bytes


def box_of(tensor: torch.Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    for index in at[: len(at) - len(shape)]:
        tensor = tensor[index]
    for dim, (start, size) in enumerate(zip(at[len(at) - len(shape) :], shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return raw(tensor)


@settings(max_examples=40, deadline=None)
@given(source_name=names, target_name=names, divided_bytes=divided)
def test_a_box_that_two_sources_hold_is_confirmed_by_one_that_does_not_send_it(
    source_name: str, target_name: str, divided_bytes: int
) -> None:
    source = LAYOUTS[source_name]
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for rank, layout in enumerate(source.ranks):
        for f in layout.fragments:
            holders.setdefault((f.name, f.start, f.shape), set()).add(rank)
    several = {name for (name, _, _), ranks in holders.items() if len(ranks) > 1}
    held = [scatter(source, rank, weights(1)) for rank in range(len(source.ranks))]
    for t in plan_transfers(source, LAYOUTS[target_name], divided_bytes).transfers:
        assert (t.confirmer is not None) == (t.name in several)
        if t.confirmer is not None:
            assert t.confirmer.rank != t.source
            sent = box_of(held[t.source][t.source_stored], t.source_at, t.shape)
            assert box_of(held[t.confirmer.rank][t.confirmer.stored], t.confirmer.at, t.shape) == sent


@given(target_name=names, replicas=st.integers(1, 5), count=st.integers(1, 4), divided_bytes=divided)
def test_ranks_that_hold_the_same_send_the_same_within_one_piece(
    target_name: str, replicas: int, count: int, divided_bytes: int
) -> None:
    source = fsdp(count, replicas)
    plan = plan_transfers(source, LAYOUTS[target_name], divided_bytes)
    sent = plan.sent(count * replicas)
    # What one rank sends of a box it sends to all that want it.
    pieces: dict[object, int] = {}
    for t in plan.transfers:
        key = (t.source, t.source_stored, t.source_at, t.shape)
        pieces[key] = pieces.get(key, 0) + t.num_bytes
    for shard in range(count):
        group = sent[shard::count]
        assert max(group) - min(group) <= max(pieces.values())


@settings(deadline=None)
@given(source_name=names, target_name=names, divided_bytes=divided, data=st.data())
def test_what_is_at_home_comes_from_home(
    source_name: str, target_name: str, divided_bytes: int, data: st.DataObject
) -> None:
    source = LAYOUTS[source_name]
    home = data.draw(st.integers(0, len(source.ranks) - 1))
    plan = plan_transfers(source, LAYOUTS[target_name], divided_bytes, home=home)
    assert plan.num_bytes == minimum_bytes(LAYOUTS[target_name])
    held = {(f.name, f.stored) for f in source.ranks[home].fragments}
    copies = {(f.name, f.start, f.shape) for f in source.ranks[home].fragments}
    for t in plan.transfers:
        if t.source == home:
            assert (t.name, t.source_stored) in held
        else:
            sent_from = next(
                f
                for f in source.ranks[t.source].fragments
                if f.name == t.name and f.stored == t.source_stored and _inside(t.source_at, t.shape, f)
            )
            assert (t.name, sent_from.start, sent_from.shape) not in copies


def _inside(at: tuple[int, ...], shape: tuple[int, ...], fragment: Fragment) -> bool:
    extra = len(fragment.at) - len(fragment.shape)
    outer = (1,) * extra + fragment.shape
    inner = (1,) * extra + shape
    return all(a <= b and b + n <= a + m for a, m, b, n in zip(fragment.at, outer, at, inner, strict=True))


@given(rows=st.integers(1, 40), columns=st.integers(1, 3), replicas=st.integers(1, 9), targets=st.integers(1, 3))
def test_one_large_tensor_is_divided_between_its_holders_to_the_row(
    rows: int, columns: int, replicas: int, targets: int
) -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(1, rows, columns))
    plan = plan_transfers(whole([spec], replicas), whole([spec], targets), 1)
    sent = plan.sent(replicas)
    if rows > 1:
        assert max(sent) - min(sent) <= 2 * columns * targets
    assert len({(t.source, t.source_at, t.shape) for t in plan.transfers}) * targets == len(plan.transfers)
    undivided = plan_transfers(whole([spec], replicas), whole([spec], targets), spec.num_bytes + 1)
    assert sorted(undivided.sent(replicas))[:-1] == [0] * (replicas - 1)


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(data=st.data(), stored=shapes)
def test_runs_are_the_bytes_of_the_box_in_order(data: st.DataObject, stored: tuple[int, ...]) -> None:
    at = tuple(data.draw(st.integers(0, n - 1)) for n in stored)
    shape = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(stored, at, strict=True))
    offsets, length = runs(shape, stored, at, 2)
    found = [o + i for o in offsets.tolist() for i in range(0, length, 2)]
    box = torch.arange(0, 2 * int(torch.tensor(stored).prod()), 2).reshape(stored)
    for dim, (a, n) in enumerate(zip(at, shape, strict=True)):
        box = box.narrow(dim, a, n)
    assert found == box.reshape(-1).tolist()


def test_a_missing_shard_and_two_overlapping_boxes_are_refused_by_name() -> None:
    full = fsdp(3)
    lacking = Layout(tensors=full.tensors, ranks=full.ranks[:2])
    with pytest.raises(InvalidFieldError, match=r"source: got 'model.*the sources lack \d+ element"):
        plan_transfers(lacking, whole(specs()))
    with pytest.raises(InvalidFieldError, match="equal or do not overlap"):
        plan_transfers(Layout(tensors=full.tensors, ranks=(*full.ranks, *fsdp(2).ranks)), whole(specs()))
    with pytest.raises(InvalidFieldError, match=r"holds?.* of \d+ elements|hold \d+ of"):
        gather(lacking, [scatter(lacking, r, weights()) for r in range(2)])


def test_sides_that_describe_different_models_are_refused() -> None:
    other = [TensorSpec(name="w", dtype="float32", shape=(3,))]
    with pytest.raises(InvalidFieldError, match=r"tensors: got 'w'; sources have \('float32', \(3,\)\), targets None"):
        plan_transfers(whole(other), whole([]))


W = TensorSpec(name="w", dtype="float32", shape=(4, 2))


def layout_with(fragment: Fragment, *more: Fragment, dtype: str = "float32") -> Layout:
    stored = TensorSpec(name="s", dtype=dtype, shape=(4, 2))
    return Layout(tensors=(W,), ranks=(RankLayout(stored=(stored,), fragments=(fragment, *more)),))


def fragment(**changes: object) -> Fragment:
    values: dict[str, object] = {"name": "w", "start": (0, 0), "shape": (2, 2), "stored": "s", "at": (0, 0)}
    return Fragment(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (fragment(name="x"), "name a known tensor"),
        (fragment(stored="x"), "name a known tensor"),
        (fragment(start=(3, 0)), r"stay inside w \[4, 2\]"),
        (fragment(start=(-1, 0)), "stay inside w"),
        (fragment(shape=(0, 2)), "stay inside w"),
        (fragment(shape=(2,)), "stay inside w"),
        (fragment(at=(3, 0)), r"stay inside stored s \[4, 2\]"),
        (fragment(at=(0,)), "stay inside stored s"),
    ],
)
def test_a_fragment_that_leaves_its_tensors_is_refused(bad: Fragment, message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        layout_with(bad)


def test_overlapping_fragments_and_conversions_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="do not place it over w"):
        layout_with(fragment(), fragment(start=(2, 0), at=(1, 0)))
    with pytest.raises(InvalidFieldError, match="layouts do not convert"):
        layout_with(fragment(), dtype="bfloat16")


def test_builders_refuse_what_does_not_fit() -> None:
    builder = RankBuilder()
    with pytest.raises(InvalidFieldError, match="index: got 2; use 0 to 1"):
        builder.shard(Slice(spec=W, index=2, count=2))
    with pytest.raises(InvalidFieldError, match="dim: got 2"):
        builder.shard(Slice(spec=W, dim=2))
    with pytest.raises(InvalidFieldError, match="same trailing sizes"):
        builder.concat("f", [Slice(spec=W), Slice(spec=W, dim=1, index=0, count=2)])
    with pytest.raises(InvalidFieldError, match="multiple of 3"):
        builder.interleave("f", [Slice(spec=W)], groups=3)
    with pytest.raises(InvalidFieldError, match="all members of f need the same shape"):
        builder.stack("f", [[Slice(spec=W)], [Slice(spec=W), Slice(spec=W)]])
