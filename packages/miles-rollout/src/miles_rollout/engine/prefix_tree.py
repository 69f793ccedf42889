"""A radix tree of token prefixes whose keys and values are in the KV slots; exact to the token.

Every node belongs to the epoch (the weights) that computed it. `reset` starts a new epoch: nothing computed
before is ever matched again; slots still locked by running sequences are returned when those let go. Unlocked
nodes are evicted leaf by leaf, least recently used first. Pure: owns no tensors, knows no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_rollout.engine.slots import SlotArray

TokenArray = NDArray[np.int32]


def common_prefix(left: TokenArray, right: TokenArray) -> int:
    """Number of leading tokens in which two sequences agree."""
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n


class Node:
    """An edge of the tree: `tokens` follow the parent's; `slots` hold them.

    Attributes:
        routes: expert ids [len(tokens), layers, top_k] of these tokens, None when not recorded.
        locks: running sequences below (or at) this node; a node is never less locked than its children.
        stamp: when it was last used, in uses of the tree.
    """

    __slots__ = ("children", "epoch", "locks", "parent", "routes", "slots", "stamp", "tokens")

    def __init__(
        self, tokens: TokenArray, slots: SlotArray, parent: Node | None, epoch: int, routes: NDArray[Any] | None = None
    ) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.epoch = epoch
        self.routes = routes
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.stamp = 0


class PrefixTree:
    """The cache. `free` gets slots that no longer hold anything."""

    def __init__(self, free: Callable[[SlotArray], None]) -> None:
        self._free = free
        self._epoch = 0
        self._clock = 0
        self._order = 0
        self._nodes = 0
        self._heap: list[tuple[int, int, Node]] = []
        self.evictable = 0
        """Tokens in unlocked nodes: what eviction could return at once."""
        self.size = 0
        """Tokens in the nodes of this epoch."""
        self.root = self._new_root()

    def _new_root(self) -> Node:
        empty = np.empty(0, dtype=np.int32)
        return Node(empty, empty, None, self._epoch)

    # -- lookup -------------------------------------------------------------------------------------------------

    def match(self, tokens: TokenArray) -> tuple[Node, int]:
        """Deepest node on the path of `tokens`, and how many tokens lead to it; marks the path as used.

        An edge that matches in part is split, so that exactly the matching part can be locked.
        """
        node, done = self.root, 0
        self._clock += 1
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens[done:])
            if shared < len(child.tokens):
                child = self._split(child, shared)
            self._touch(child)
            node = child
            done += shared
        return node, done

    def collect(self, node: Node) -> SlotArray:
        """Slots of all tokens from the root to the end of `node`."""
        parts = [n.slots for n in _path(node)]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)

    def collect_routes(self, node: Node) -> NDArray[Any] | None:
        """Expert ids from the root to the end of `node`; None when any part was not recorded."""
        parts = [n.routes for n in _path(node)]
        known = [p for p in parts if p is not None]
        return np.concatenate(known[::-1]) if parts and len(known) == len(parts) else None

    # -- growth -------------------------------------------------------------------------------------------------

    def insert(self, tokens: TokenArray, slots: SlotArray, routes: NDArray[Any] | None = None) -> tuple[Node, int]:
        """Hand over the slots of `tokens`; returns the end node and how many leading tokens were there before.

        For those the tree keeps its own slots: the caller returns its duplicates.
        """
        node, done = self.match(tokens)
        if done < len(tokens):
            rest = None if routes is None else routes[done:].copy()
            leaf = Node(tokens[done:].copy(), slots[done:].copy(), node, self._epoch, rest)
            node.children[int(tokens[done])] = leaf
            self._nodes += 1
            self.size += len(leaf.tokens)
            self.evictable += len(leaf.tokens)
            self._touch(leaf)
            node = leaf
        return node, done

    def _split(self, child: Node, at: int) -> Node:
        """Cut an edge after `at` tokens; returns the upper part."""
        parent = child.parent
        assert parent is not None  # the root has no tokens, so it never matches in part
        routes = child.routes
        upper = Node(child.tokens[:at], child.slots[:at], parent, child.epoch, None if routes is None else routes[:at])
        upper.locks, upper.stamp = child.locks, child.stamp
        parent.children[int(upper.tokens[0])] = upper
        child.tokens, child.slots, child.parent = child.tokens[at:], child.slots[at:], upper
        child.routes = None if routes is None else routes[at:]
        upper.children[int(child.tokens[0])] = child
        self._nodes += 1
        return upper

    # -- locks --------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep the path to `node` until `unlock`."""
        for n in _path(node):
            if n.locks == 0 and n.epoch == self._epoch:
                self.evictable -= len(n.tokens)
            n.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Nodes of an earlier epoch that nobody holds any more return their slots."""
        for n in _path(node):
            n.locks -= 1
            if n.locks == 0:
                if n.epoch == self._epoch:
                    self.evictable += len(n.tokens)
                    self._offer(n)
                else:
                    self._free(n.slots)

    # -- shrinking ----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Return at least `count` tokens' slots if so many are unlocked; the number returned."""
        freed = 0
        while freed < count and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            if node.stamp != stamp or not self._is_evictable(node):
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.tokens[0])]
            freed += len(node.tokens)
            self._free(node.slots)
            self.size -= len(node.tokens)
            self.evictable -= len(node.tokens)
            self._nodes -= 1
            node.epoch = -1  # whatever still points here is stale
            self._offer(parent)
        return freed

    def reset(self) -> None:
        """Start a new epoch: forget everything, return all slots that no running sequence holds."""
        stack = list(self.root.children.values())
        self._epoch += 1
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.locks == 0:
                self._free(node.slots)
        self._heap.clear()
        self._nodes = self.size = self.evictable = 0
        self.root = self._new_root()

    def is_current(self, node: Node) -> bool:
        """Whether a node can still be extended: it was made under the present weights."""
        return node.epoch == self._epoch

    def _is_evictable(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None and node.epoch == self._epoch

    def _touch(self, node: Node) -> None:
        node.stamp = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        if not self._is_evictable(node):
            return
        self._order += 1
        heapq.heappush(self._heap, (node.stamp, self._order, node))
        if len(self._heap) > 64 + 4 * self._nodes:  # drop outdated entries before they pile up
            self._heap = [e for e in self._heap if e[2].stamp == e[0] and self._is_evictable(e[2])]
            heapq.heapify(self._heap)


def _path(node: Node) -> list[Node]:
    """`node` and its ancestors below the root, deepest first."""
    path = []
    current: Node | None = node
    while current is not None and current.parent is not None:
        path.append(current)
        current = current.parent
    return path
