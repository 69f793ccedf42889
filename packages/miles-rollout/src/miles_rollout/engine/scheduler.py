"""The scheduler decides what the next forward pass computes. A pure state machine: no tensors, tasks or clocks.

A step feeds one token of every decoding sequence and spends what is left of its token budget on prompts, in
pieces (chunked prefill), so that neither a long prompt nor a late arrival holds up the batch. Sequences that
share a prefix compute it once: whoever comes second waits until the first has put the shared part into the
prefix tree. When the KV slots run out, the youngest sequence is retracted: it goes back to the queue and its
missing KV is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from miles_contracts import InvalidFieldError
from miles_rollout.engine.prefix_tree import PrefixTree, common_prefix
from miles_rollout.engine.sequence import Finish, Sequence, State
from miles_rollout.engine.slots import SlotAllocator, SlotTable


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine has room for.

    Attributes:
        kv_tokens: KV slots.
        context_length: most tokens of one sequence.
        max_running: most sequences in one step.
        step_tokens: most tokens fed in one step (decoding sequences always go, even past it).
        max_queued: most waiting sequences; more are refused.
        min_shared: a sequence waits for a running one only when that saves at least so many tokens.
        headroom: slots per running sequence kept free at admission, so that decoding seldom retracts.
    """

    kv_tokens: int
    context_length: int
    max_running: int = 256
    step_tokens: int = 2048
    max_queued: int = 65536
    min_shared: int = 8
    headroom: int = 16

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "context_length", "max_running", "step_tokens", "max_queued", "min_shared"):
            if getattr(self, name) < 1:
                raise InvalidFieldError(f"Limits.{name}", getattr(self, name), "use a value >= 1")


@dataclass(slots=True)
class Chunk:
    """Feed `count` tokens of `sequence` from position `start`; `samples` when its next token follows."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the last known token."""
        return self.start + self.count == self.sequence.length


class Scheduler:
    """Queues, batch and KV slots.

    Args:
        limits: see `Limits`.
        sharing: whether finished parts go into the prefix tree (models that do not run on slots cannot).
        whole_prompts: never cut a prompt into chunks (for models whose cache cannot be extended piecewise).
    """

    def __init__(self, limits: Limits, *, sharing: bool = True, whole_prompts: bool = False) -> None:
        self.limits = limits
        self.sharing = sharing
        self._whole_prompts = whole_prompts
        self.allocator = SlotAllocator(limits.kv_tokens)
        self.table = SlotTable(limits.max_running, limits.context_length)
        self.tree = PrefixTree(self.allocator.give)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused = False
        self.retracted = 0
        self.fed_tokens = 0
        self.cached_tokens = 0
        self._arrivals = 0

    # -- what comes in ------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, finish: Finish | None = None) -> None:
        """End a sequence; what it computed stays in the prefix tree."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        sequence.waits_for = None
        if finish is not None:
            sequence.finish = finish

    def retract_all(self) -> None:
        """All running sequences go back to the queue, oldest first, ahead of those that never ran."""
        for sequence in sorted(self.running, key=lambda s: -s.arrival):
            self._retract(sequence)

    def weights_changed(self) -> None:
        """Nothing computed so far is shared any more; running sequences keep their own KV (in place)."""
        self.tree.reset()
        for sequence in self.running:
            sequence.clean = False

    def flush(self) -> int:
        """Forget all cached prefixes that no running sequence holds; the number of tokens forgotten."""
        return self.tree.evict(self.tree.evictable)

    # -- what goes out ------------------------------------------------------------------------------------------

    def next_step(self) -> list[Chunk]:
        """The chunks of the next forward pass, slots assigned: decoding sequences first. Empty: nothing to do."""
        if self.paused:
            return []
        chunks = self._continue_running()
        self._admit(chunks)
        for chunk in chunks:
            self.fed_tokens += chunk.count
        return chunks

    def computed(self, chunks: list[Chunk]) -> None:
        """The forward pass is done: its keys and values are in the slots. Call before tokens are appended."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.start < sequence.prompt_length and sequence.clean:
                self._share(sequence)

    def _continue_running(self) -> list[Chunk]:
        decoding = [s for s in self.running if s.length - s.computed == 1]
        chunks = [Chunk(s, s.computed, 1) for s in decoding]
        chunks += self._continue_prompts(self.limits.step_tokens - len(decoding))
        need = sum(chunk.count for chunk in chunks)
        while not self._make_room(need):
            victim = max(self.running, key=lambda s: s.arrival)
            self._retract(victim)
            self.retracted += 1
            need -= sum(c.count for c in chunks if c.sequence is victim)
            chunks = [c for c in chunks if c.sequence is not victim]
        self._assign(chunks)
        return chunks

    def _continue_prompts(self, budget: int) -> list[Chunk]:
        """Next pieces of unfinished prompts.

        The oldest gets all of the budget when it is alone, else half; the others go shortest first, and leave
        half of the rest to waiting sequences: a very long prompt delays short ones a little, never until its end.
        """
        filling = sorted((s for s in self.running if s.length - s.computed > 1), key=lambda s: s.arrival)
        chunks: list[Chunk] = []
        others = sorted(filling[1:], key=lambda s: s.length - s.computed)
        for place, sequence in enumerate(filling[:1] + others):
            share = budget
            if (place == 0 and others) or self.waiting:
                share = (budget + 1) // 2
            count = self._piece(sequence.length - sequence.computed, share)
            if count > 0:
                chunks.append(Chunk(sequence, sequence.computed, count))
                budget -= count
        return chunks

    def _piece(self, rest: int, share: int) -> int:
        return rest if self._whole_prompts else min(rest, share)

    def _assign(self, chunks: list[Chunk]) -> None:
        slots = self.allocator.take(sum(chunk.count for chunk in chunks))
        table, at = self.table.slots, 0
        for chunk in chunks:
            end = chunk.start + chunk.count
            table[chunk.sequence.row, chunk.start : end] = slots[at : at + chunk.count]
            chunk.sequence.held = end
            at += chunk.count

    def _admit(self, chunks: list[Chunk]) -> None:
        """Move waiting sequences into the batch, in order, while budget, rows and slots last."""
        budget = self.limits.step_tokens - sum(chunk.count for chunk in chunks)
        filling = [c.sequence for c in chunks if c.count > 1]
        skipped: list[Sequence] = []
        while self.waiting and budget > 0 and self.table.free_rows:
            sequence = self.waiting.popleft()
            if self._should_wait(sequence, filling):
                skipped.append(sequence)
                continue
            chunk = self._start(sequence, budget)
            if chunk is None:
                self.waiting.appendleft(sequence)
                break
            chunks.append(chunk)
            budget -= chunk.count
            filling.append(sequence)
            if self._whole_prompts:
                break
        self.waiting.extendleft(reversed(skipped))

    def _should_wait(self, sequence: Sequence, filling: list[Sequence]) -> bool:
        """Whether a running sequence is about to compute more of this one's prefix than the tree has."""
        if not self.sharing:
            return False
        if sequence.waits_for is not None:
            leader, shared = sequence.waits_for
            if leader.state is State.RUNNING and leader.clean and leader.computed < shared:
                return True
            sequence.waits_for = None
        if not filling:
            return False
        limit = sequence.match_limit
        known = sequence.known[:limit]
        have = self.tree.match(known)[1]
        for leader in filling:
            need = max(have, leader.computed) + self.limits.min_shared
            if not leader.clean or need > min(leader.length, limit) or leader.tokens[need - 1] != known[need - 1]:
                continue  # one token tells most strangers apart; comparing them whole is quadratic in arrivals
            shared = common_prefix(leader.known, known)
            if shared >= need:
                sequence.waits_for = (leader, shared)
                return True
        return False

    def _start(self, sequence: Sequence, budget: int) -> Chunk | None:
        """Take rows and slots for a waiting sequence; None when it does not fit now."""
        node, matched = self.tree.root, 0
        if self.sharing:
            node, matched = self.tree.match(sequence.known[: sequence.match_limit])
            self.tree.lock(node)
        rest = sequence.length - matched
        reserve = self.limits.headroom * (len(self.running) + 1) if self.running else 0
        if rest + reserve > self.allocator.free_count + self.tree.evictable:
            if self.sharing:
                self.tree.unlock(node)
            return None
        sequence.row = self.table.take_row()
        sequence.feed_again()
        if self.sharing:
            self.table.slots[sequence.row, :matched] = self.tree.collect(node)
            sequence.node, sequence.owned, sequence.held = node, matched, matched
            if matched > 0:
                routes = self.tree.collect_routes(node)
                if routes is not None:
                    sequence.record_routes(0, routes)
        if sequence.cached is None:
            sequence.cached = matched
        self.cached_tokens += matched
        sequence.computed, sequence.clean, sequence.state = matched, True, State.RUNNING
        self.running.append(sequence)
        count = self._piece(rest, budget)
        self._make_room(count)
        chunk = Chunk(sequence, matched, count)
        self._assign([chunk])
        return chunk

    # -- slots --------------------------------------------------------------------------------------------------

    def _make_room(self, count: int) -> bool:
        missing = count - self.allocator.free_count
        if missing > 0 and self.tree.evictable >= missing:
            self.tree.evict(missing)
        return self.allocator.free_count >= count

    def _share(self, sequence: Sequence) -> None:
        """Put all that a running sequence has computed into the tree, and use the tree's slots from then on."""
        if not self.sharing or sequence.computed <= sequence.owned:
            return
        row = self.table.slots[sequence.row]
        done = sequence.computed
        node, present = self.tree.insert(sequence.tokens[:done], row[:done], sequence.rows_to_share(done))
        if present > sequence.owned:
            mine = row[sequence.owned : present].copy()
            theirs = self.tree.collect(node)[sequence.owned : present]
            row[sequence.owned : present] = theirs
            self.allocator.give(mine)
        self.tree.lock(node)
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        sequence.node, sequence.owned = node, done

    def _release(self, sequence: Sequence) -> None:
        """Give back the row; clean KV stays in the tree, the rest is free."""
        if sequence.clean:
            self._share(sequence)
        self.allocator.give(self.table.slots[sequence.row, sequence.owned : sequence.held].copy())
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        self.table.give_row(sequence.row, sequence.held)
        sequence.row, sequence.node = -1, None
        sequence.owned = sequence.held = sequence.computed = 0
        sequence.native_cache = None

    def _retract(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        sequence.retractions += 1
        self.waiting.appendleft(sequence)

    def everything(self) -> Iterator[Sequence]:
        """All sequences that have not finished."""
        yield from list(self.running)
        yield from list(self.waiting)
