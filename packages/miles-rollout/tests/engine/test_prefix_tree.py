"""The prefix tree against a plain list of everything inserted; slots are never lost, shared wrongly or kept twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_rollout.engine.prefix_tree import Node, PrefixTree, common_prefix
from miles_rollout.engine.slots import SlotAllocator, SlotTable

Tokens = tuple[int, ...]


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def insert(tree: PrefixTree, slots: SlotAllocator, tokens: Tokens) -> Node:
    """Insert as the scheduler does: what the tree had already keeps the tree's slots."""
    mine = slots.take(len(tokens))
    node, present = tree.insert(array(tokens), mine)
    slots.give(mine[:present])
    return node


def test_match_is_exact_to_the_token_and_splits_edges() -> None:
    slots = SlotAllocator(20)
    tree = PrefixTree(slots.give)
    insert(tree, slots, (1, 2, 3, 4, 5))
    insert(tree, slots, (1, 2, 9))
    assert tree.size == 6
    node, length = tree.match(array((1, 2, 3, 7)))
    assert length == 3
    assert len(tree.collect(node)) == 3
    assert tree.match(array((2, 1)))[1] == 0
    assert tree.match(array((1, 2, 9, 9)))[1] == 3


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    slots = SlotAllocator(9)
    tree = PrefixTree(slots.give)
    for tokens in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        insert(tree, slots, tokens)
    tree.match(array((1, 1, 1)))
    assert tree.evict(1) == 3
    assert [tree.match(array(t))[1] for t in ((1, 1, 1), (2, 2, 2), (3, 3, 3))] == [3, 0, 3]


def test_locked_nodes_stay_and_so_do_their_ancestors() -> None:
    slots = SlotAllocator(10)
    tree = PrefixTree(slots.give)
    insert(tree, slots, (1, 2, 3))
    node = insert(tree, slots, (1, 2, 4))
    tree.lock(node)
    assert tree.evictable == 1
    assert tree.evict(10) == 1
    assert tree.match(array((1, 2, 4)))[1] == 3
    tree.unlock(node)
    assert tree.evict(10) == 3
    assert slots.free_count == 10


def test_reset_forgets_at_once_and_returns_locked_slots_later() -> None:
    slots = SlotAllocator(10)
    tree = PrefixTree(slots.give)
    insert(tree, slots, (7, 8))
    node = insert(tree, slots, (1, 2, 3))
    tree.lock(node)
    tree.reset()
    assert tree.match(array((1, 2, 3)))[1] == 0
    assert not tree.is_current(node)
    assert slots.free_count == 7
    tree.unlock(node)
    assert slots.free_count == 10


def test_routes_follow_splits() -> None:
    slots = SlotAllocator(10)
    tree = PrefixTree(slots.give)
    routes = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    tree.insert(array((1, 2, 3, 4)), slots.take(4), routes)
    node, _ = tree.match(array((1, 2)))
    known = tree.collect_routes(node)
    assert known is not None
    assert known[:, 0, 0].tolist() == [0, 1]
    leaf, _ = tree.match(array((1, 2, 3, 4)))
    whole = tree.collect_routes(leaf)
    assert whole is not None
    assert whole[:, 0, 0].tolist() == [0, 1, 2, 3]


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), sequences),
        st.tuples(st.just("match"), sequences),
        st.tuples(st.just("lock"), sequences),
        st.tuples(st.just("unlock"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(1, 10)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_tree_agrees_with_a_plain_model(steps: list[tuple[str, object]]) -> None:
    """`content[slot]` is the whole prefix that the slot's keys were computed from: a match must find exactly that."""
    capacity = 1000
    slots = SlotAllocator(capacity)
    tree = PrefixTree(slots.give)
    content: dict[int, Tokens] = {}
    locked: list[tuple[Node, Tokens, list[int]]] = []
    inserted: set[Tokens] = set()
    evicted = False
    for name, value in steps:
        if name == "insert":
            assert isinstance(value, tuple)
            mine = slots.take(len(value))
            for i, slot in enumerate(mine.tolist()):
                content[slot] = value[: i + 1]
            _, present = tree.insert(array(value), mine)
            slots.give(mine[:present])
            inserted.add(value)
        elif name in ("match", "lock"):
            assert isinstance(value, tuple)
            node, length = tree.match(array(value))
            found = tree.collect(node).tolist()
            assert [content[s] for s in found] == [value[: i + 1] for i in range(length)]
            longest = max((common_prefix(array(value), array(t)) for t in inserted), default=0)
            assert length == longest if not evicted else length <= longest
            if name == "lock":
                tree.lock(node)
                locked.append((node, value[:length], found))
        elif name == "unlock" and locked:
            assert isinstance(value, int)
            tree.unlock(locked.pop(value % len(locked))[0])
        elif name == "evict":
            assert isinstance(value, int)
            free, could = slots.free_count, tree.evictable
            freed = tree.evict(value)
            assert slots.free_count == free + freed
            assert freed >= min(value, could)
            evicted = True
        elif name == "reset":
            tree.reset()
            inserted.clear()
        for _, tokens, held in locked:  # nothing that is locked was touched
            assert [content[s] for s in held] == [tokens[: i + 1] for i in range(len(tokens))]
    for node, _, _ in locked:
        tree.unlock(node)
    assert tree.evictable == tree.size
    tree.evict(capacity)
    assert slots.free_count == capacity


def test_allocator_refuses_to_give_or_take_too_much() -> None:
    slots = SlotAllocator(3)
    taken = slots.take(2)
    assert 0 not in taken
    with pytest.raises(InvalidFieldError, match="only 1 slots are free"):
        slots.take(2)
    slots.give(taken)
    with pytest.raises(InvalidFieldError, match="returned twice"):
        slots.give(taken)
    with pytest.raises(InvalidFieldError, match="at least one token"):
        SlotAllocator(0)


def test_table_rows_come_back_clean() -> None:
    table = SlotTable(2, 4)
    row = table.take_row()
    table.slots[row, :3] = 9
    table.give_row(row, 3)
    assert not table.slots.any()
    assert table.free_rows == 2
